"""A script as a process: many commands side by side, resumed, with their progress, and the results that they write."""
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from .files import check_writable, five_digits, make_folder
from .messages import InputError, command_line


class Job(NamedTuple):
    """A command that writes metrics.json in a folder when it is done; a run resumes from what is there."""
    name: str                      # in messages
    words: list                    # the command's words after python3
    folder: Path
    after: tuple = ()              # names of the jobs that end before this one begins, if they are to be run

    @property
    def path(self):
        """The file that marks the job as done"""
        return self.folder / "metrics.json"


def missing(jobs):
    """Return the jobs that are to be run"""
    return [job for job in jobs if not job.path.exists()]


def make_places(jobs):
    """Create the folders of some jobs. Raise InputError, before anything is trained, if a file cannot be written."""
    for job in jobs:
        make_folder(job.folder)
        check_writable(job.path)


def run(jobs, n_at_once, say, folder=None):
    """Run the commands of those jobs whose file is missing, in a folder (None: the current one), n_at_once side by
    side. One that was interrupted resumes. Raise InputError as soon as one fails: the others are
    stopped, and none is begun."""
    jobs = missing(jobs)
    make_places(jobs)
    done, processes, stopped = {job.name: threading.Event() for job in jobs}, [], threading.Event()
    began = time.perf_counter()

    def tell(job, text):
        say(f"  {time.perf_counter() - began:6.0f} s  {job.name}  {text}")

    def one(job):
        for name in job.after:
            if name in done:
                done[name].wait()
        try:
            process = subprocess.Popen([sys.executable, *map(str, job.words)], cwd=folder, encoding="utf-8",
                                       errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(process)
            if stopped.is_set():
                process.terminate()
            last = "stopped"
            for line in filter(str.strip, process.stdout):
                last = line.strip()
                if re.match(r"epoch \d|!!|.*resuming at", last):
                    tell(job, last)
            if code := process.wait():
                last = last if code > 0 else f"was ended by signal {-code}, as when memory is short"
                remedy = ""
                if str(job.folder) in last and "damaged" in last:
                    remedy = f". Delete {job.folder} to begin this run anew"
                last = last.removeprefix("error: ").removeprefix(f"{job.name}: ")
                raise InputError(f"{job.name}: {last}{remedy} (command: {command_line(*job.words)})")
        finally:
            done[job.name].set()
        tell(job, "done")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ThreadPoolExecutor(n_at_once) as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException as error:
            stopped.set()
            for future in futures:
                future.cancel()
            for process in processes:
                process.terminate()
            if isinstance(error, KeyboardInterrupt):
                print("\nstopped; the same command resumes", file=sys.stderr)
                sys.exit(130)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def read_result(path, experiment):
    """Return the result of an experiment that a job has written, a dict. Raise InputError if the file is damaged."""
    try:
        result = five_digits(json.loads(path.read_text(encoding="utf-8")))
        if result["experiment"] != experiment or not isinstance(result["config"], dict):
            raise ValueError("another experiment's")
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: not a whole result. Delete it and give this command again") from None
