"""submitit's executor for SLURM, which calls sbatch as all of minfer calls SLURM's commands (`jobs.commands`)."""

from __future__ import annotations

import uuid
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedSubmissionError, JobPaths
from submitit.slurm.slurm import SlurmJob

from minfer.jobs import commands

# The first line of a job's script: it gives the job's file the name under which submitit looks for it. The launcher does the
# same, but not if it gets no answer from sbatch, and SLURM may have queued the job nevertheless.
TAKE_FILE = (
    '[ -z "${MINFER_FILES-}" ] || ln "$MINFER_FILES-${SLURM_ARRAY_TASK_ID:-0}.pkl" "${MINFER_FILES%/*}/'
    '${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}_submitted.pkl" 2>/dev/null'
)


class Submitter(submitit.SlurmExecutor):
    """submitit's own executor calls sbatch without a time limit, and does not remove the user's variables for sbatch."""

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        """Submits one job, or several as an array. Raises commands.Failed if SLURM refuses them, and commands.Silent if it does
        not answer: then the jobs may be queued."""
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        name, n = uuid.uuid4().hex, len(delayed_submissions)
        files = [folder / f"{name}-{index}.pkl" for index in range(n)]
        for file, delayed in zip(files, delayed_submissions, strict=True):
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            delayed.dump(file)
        if n > 1:
            self.parameters["map_count"] = n
        script = folder / f".submission_file_{name}.sh"
        script.write_text(self._make_submission_file_text(self._submitit_command_str, name))
        said = commands.run("sbatch", str(script), MINFER_FILES=str(folder / name))
        try:
            job = self._get_job_id_from_submission_command(said)
        except FailedSubmissionError as error:
            raise commands.Silent(f"sbatch said {said!r}, without the id of a job") from error
        JobPaths(self.folder, job).move_temporary_file(script, "submission_file", keep_as_symlink=True)
        ids = [job] if n == 1 else [f"{job}_{index}" for index in range(n)]
        for file, each in zip(files, ids, strict=True):
            JobPaths(self.folder, each).move_temporary_file(file, "submitted_pickle")
        return [SlurmJob(folder=self.folder, job_id=each, tasks=[0]) for each in ids]
