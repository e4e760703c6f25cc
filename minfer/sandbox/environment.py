"""The environment variables that untrusted code may have. It is a list of allowed names, because any other variable may hold a
password."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Variables that Python, PyTorch, Triton, CUDA, OpenMP and compilers read, those that say where this process runs, and minfer's.
# fmt: off
NAMES = frozenset([
    "PATH", "PWD", "OLDPWD", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP",
    "XDG_CACHE_HOME", "NO_COLOR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH",
    "GCC_EXEC_PREFIX", "CC", "CXX", "CPP", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MAX_JOBS", "CCACHE_DIR",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER", "PYTHONNOUSERSITE", "PYTHONUTF8", "PYTHONWARNINGS", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CPUS_PER_TASK",
    "FAKETIME", "GLIBC_TUNABLES", "HYDRA_FULL_ERROR", "PYTEST_CURRENT_TEST",
])
# fmt: on
PREFIXES = (
    *("ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "KINETO_", "KMP_", "LC_", "MALLOC_", "MINFER_", "MKL_"),
    *("NCCL_", "NUMEXPR_", "NVCC_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_"),
    "TRITON_",
)
SECRET = re.compile(
    r"(?:^|_)(?:AUTH|COOKIE|CREDENTIALS?|JWT|KEYS?|PASS|PASSWD|PASSWORD|SECRETS?|TOKENS?|WEBHOOK)(?:_|$)"
)


def is_allowed(name: str) -> bool:
    """Whether a process in a sandbox may have this variable. No prefix allows a name that sounds like a secret."""
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET.search(name))


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that a process in a sandbox may have."""
    return {name: value for name, value in environment.items() if is_allowed(name)}
