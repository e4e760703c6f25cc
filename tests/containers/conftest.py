"""The images of the Dockerfile and apptainer.def, built for real without a Docker engine.

A minimal Debian stands in for NVIDIA's base image. Its uv finds empty packages in place of the pinned ones, gigabytes
that need not be downloaded again: the site-packages that run these tests are bound over them at run time. All else is
as a user has it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

DIGEST = "sha256:" + hashlib.sha256(b"stand-in").hexdigest()
COMMIT = "0123456789ab"
SOMEBODY = 4321  # a user that no image knows
# Python of each Debian: the site-packages of the tests must fit the image's.
DEBIAN = {(3, 11): "bookworm", (3, 13): "trixie"}
HERE = Path(__file__).resolve().parent
HOST = Path(sysconfig.get_path("purelib"))
SITE = f"/opt/minfer/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def obstacle() -> str | None:
    """Why the images cannot be built here."""
    if missing := [tool for tool in ("mmdebstrap", "buildah", "apptainer") if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}; as root on Debian, tests/containers/install.sh installs them"
    if os.geteuid() != 0:
        return "building without a Docker engine needs root"
    if sys.version_info[:2] not in DEBIAN:
        return "no Debian release has the Python of these tests"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = obstacle()
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.containers)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def sh(*words: str | Path, code: int = 0, **options: object) -> str:
    """Run a command and return what it printed; fail with all of it where the exit status is another."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert done.returncode == code, f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}"
    return str(done.stdout + done.stderr)


@dataclass
class Built:
    """Both images, and how to run them."""

    work: Path
    buildah: list[str]

    def docker(self, *words: str, code: int = 0, user: int = SOMEBODY, **mounts: Path) -> str:
        """As `docker run --user USER -v RESULTS:/workspace/results minfer WORDS`; `mounts` are by their names in the image's
        /workspace."""
        about = json.loads(sh(*self.buildah, "inspect", "--type", "image", "minfer"))["OCIv1"]["config"]
        container = sh(*self.buildah, "from", "--pull-never", "minfer").strip()
        binds = ["-v", f"{HOST}:{SITE}:ro"]
        binds += [word for name, path in mounts.items() for word in ("-v", f"{path}:/workspace/{name}")]
        try:
            return sh(*self.buildah, "run", "--isolation", "chroot", "--user", f"{user}:{user}", *binds, container, "--",
                      *about["Entrypoint"], *words, code=code)  # fmt: skip
        finally:
            sh(*self.buildah, "rm", container)

    def apptainer(self, *words: str | Path, code: int = 0, cwd: Path) -> str:
        """As `apptainer run minfer.sif WORDS` in a folder."""
        command = ("apptainer", "run", "--cleanenv", "--bind", f"{HOST}:{SITE}:ro", self.work / "minfer.sif")
        return sh(*command, *words, code=code, cwd=cwd, env=own(self.work))


def own(work: Path) -> dict[str, str]:
    """The environment for Apptainer, with its files in a folder of the tests' own."""
    # Root in a sandbox may lack this capability, and then nothing starts.
    capabilities = {"APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"}
    return os.environ | capabilities | {"APPTAINER_CACHEDIR": str(work / "cache"), "APPTAINER_TMPDIR": str(work)}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    work = tmp_path_factory.mktemp("containers")
    buildah = [
        "buildah",
        "--root",
        str(work / "storage"),
        "--runroot",
        str(work / "run"),
        "--storage-driver",
        "overlay",
    ]
    try:
        stand_in(work, buildah)
        certificates = "\n".join(p.read_text() for p in Path("/usr/local/share/ca-certificates").glob("**/*.crt"))
        arguments = {
            "BASE_IMAGE": "localhost/base", "BASE_DIGEST": DIGEST, "COMMIT": COMMIT, "NSIGHT_COMPUTE": "0",
            "CA_CERTIFICATE": certificates,
        }  # fmt: skip
        sh(*buildah, "bud", "--isolation", "chroot", "--format", "docker", "--pull-never", "-t", "minfer",
           *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")), ROOT)  # fmt: skip
        sh(*buildah, "push", "-q", "minfer", f"docker-archive:{work}/minfer.tar:minfer:latest")
        sh("apptainer", "build", "--mksquashfs-args", "-comp zstd -Xcompression-level 1", "--bind", f"{HOST}:{SITE}:ro",
           work / "minfer.sif", ROOT / "apptainer.def", cwd=work, env=own(work))  # fmt: skip
        yield Built(work, buildah)
    finally:
        subprocess.run([*buildah, "rm", "--all"], capture_output=True)
        subprocess.run([*buildah, "rmi", "--all", "--force"], capture_output=True)
        shutil.rmtree(work, ignore_errors=True)


def stand_in(work: Path, buildah: list[str]) -> None:
    """The base image: a minimal Debian, whose uv finds an empty package for each pinned one, and for those of extras, which
    it takes into account without installing them."""
    empty = work / "empty"
    empty.mkdir()
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions = {tuple(pin.split(" ;")[0].split("==")) for pin in about["tool"]["uv"]["constraint-dependencies"]}
    extras = {word.split(";")[0] for words in about["project"]["optional-dependencies"].values() for word in words}
    least = {(name, version or "1") for name, _, version in (word.partition(">=") for word in extras)}
    for name, version in versions | least:
        empty_wheel(empty, name, version)
    (work / "uv.toml").write_text('no-index = true\nfind-links = ["/opt/empty"]\n')
    # No manuals, and no waiting for the disk: both also for what the Dockerfile installs.
    sh("mmdebstrap", "--quiet", "--variant=apt", "--aptopt=Acquire::Check-Valid-Until \"false\"",
       "--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
       "--dpkgopt=path-exclude=/usr/share/locale/*", DEBIAN[sys.version_info[:2]], work / "base.tar",
       mirror())  # fmt: skip
    container = sh(*buildah, "from", "scratch").strip()
    for source, target in (("base.tar", "/"), ("uv.toml", "/etc/uv/uv.toml"), ("empty", "/opt/empty")):
        sh(*buildah, "add", "-q", container, work / source, target)
    sh(*buildah, "commit", "-q", "--rm", container, "localhost/base")


def mirror() -> str:
    """Where this machine has its Debian packages from."""
    path = Path("/etc/apt/sources.list.d/debian.sources")
    found = re.search(r"^URIs:\s*(\S+)", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else "http://deb.debian.org/debian"


def empty_wheel(folder: Path, name: str, version: str) -> None:
    """A package of that name and version with nothing in it; `ninja` and `pytest` alone have their commands, which are
    outside of site-packages."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "ninja":
        files[f"{stem}.data/scripts/ninja"] = (Path(sysconfig.get_path("scripts")) / "ninja").read_bytes()
    if name == "pytest":
        files[f"{stem}.dist-info/entry_points.txt"] = b"[console_scripts]\npytest = pytest:console_main\n"
    record = "".join(f"{path},sha256={_hash(content)},{len(content)}\n" for path, content in files.items())
    files[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
