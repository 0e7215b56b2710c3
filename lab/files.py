"""Files of a program: written whole or not at all, refused before anything is computed for them."""
import contextlib
import json
import math
import os
import platform
import time
from pathlib import Path

from .messages import InputError, Progress, n_cores


def home_path(path):
    """Return a path with ~ expanded. Where there is no such home, as for a user without a passwd entry: a path at which
    nothing can be read or written."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(os.devnull, path)


def replace(temporary, path):
    """Rename a file over another. Windows does not do so while another program reads it: wait for up to two seconds"""
    n_tries = 41 if os.name == "nt" else 1
    for _ in range(n_tries - 1):
        try:
            os.replace(temporary, path)
            return
        except PermissionError:
            time.sleep(0.05)
    os.replace(temporary, path)


def write_atomically(path, write, keep=True):
    """Call write(binary file) on a temporary file beside `path`, then rename it, so that the file is written whole or
    not at all; if not `keep`, only try to write. Raise InputError if it cannot be written.

    tempfile is not used: on Windows, before Python 3.12.4, it tries forever in a folder that denies access."""
    path = Path(os.path.realpath(path))                                 # a link is followed, not replaced
    temporary = f"{path}.{os.urandom(4).hex()}"
    try:
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep:
                replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}. Name a file in a writable folder with room"
                         ) from None


def check_writable(*paths):
    """Raise InputError before training, not after it, if an output file could not be written or is given twice: do what
    write_atomically will do. Empty paths, and "-" for standard output, are ignored."""
    paths = [Path(os.path.realpath(path)) for path in paths if path and str(path) != "-"]
    for path in paths:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: it is a folder or a device. Give the name of a file")
        write_atomically(path, lambda file: file.write(bytes(2 ** 16)), keep=False)
        if path.exists() and not path.stat().st_mode & 0o200:
            raise InputError(f"cannot replace {path}: it is read-only. Give another name, or make it writable")
    if len(set(paths)) < len(paths):
        raise InputError(f"{max(paths, key=paths.count)}: two outputs have this name. Give each a file of its own")


def make_folder(path, flag=""):
    """Create a folder, which a flag named. Raise InputError if that is not possible"""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag}{path}: cannot be created ({error.strerror}). Choose another folder") from None


def make_outdir(outdir, names):
    """Create the folder of the figures `names`. Raise InputError if the folder or one of the PNGs cannot be written."""
    make_folder(outdir, "--outdir ")
    check_writable(*(outdir / f"{name}.png" for name in names))


def five_digits(results):
    """Return a dict for JSON: floats, except those of config, with five significant digits; nan and infinity as None"""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
    return {key: value if key == "config" else plain(value) for key, value in results.items()}


def write_json(path, results):
    """Write five_digits of a dict atomically, one line per key"""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in five_digits(results).items())
    if str(path) == "-":
        Progress(False).say(f"{{\n{lines}\n}}")
    else:
        write_atomically(path, lambda file: file.write(f"{{\n{lines}\n}}\n".encode()))


def write_csv(path, rows):
    """Write rows of texts and numbers, none of which has a comma, as CSV, atomically"""
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def machine():
    """Return what run times depend on: the processor's name and the number of cores"""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        processor = Path("/proc/cpuinfo").read_text("utf-8").split("model name")[1].split("\n")[0].strip("\t: ")
    return {"processor": processor, "cores": n_cores()}
