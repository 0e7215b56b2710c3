"""Messages and the command line of a program: one-line errors, exit codes, progress, --help."""
import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

try:
    import numpy as np
except ImportError:
    np = None
if not hasattr(np, "vecdot"):
    print(f'error: NumPy 2 or later is missing: {sys.executable} -m pip install "numpy>=2"', file=sys.stderr)
    sys.exit(2)

REPORT_SECONDS = 15                # without a terminal a line of progress appears at least so often


class InputError(Exception):
    """Wrong input: the message is one line that says what is wrong and what to do next"""
    exit_code = 2


def counted(n, noun):
    """Return a number with its noun, as in 1 epoch, 12 epochs"""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def first_of(names, most):
    """Return the first names in a message, at most so many, and an ellipsis if there are more"""
    text = ", ".join(map(str, names[:most]))
    return f"{text}, ..." if len(names) > most else text


def flag_name(name):
    """Return the command-line flag of a setting"""
    return "--" + name.replace("_", "-")


def command_line(*words):
    """Return a command of Python to copy into this system's shell: with this Python, if it is not the usual one"""
    usual = "python" if os.name == "nt" else "python3"
    found = shutil.which(usual)
    if found is None or os.path.dirname(found) != os.path.dirname(sys.executable):
        usual = sys.executable
    if os.name == "nt":
        return subprocess.list2cmdline([usual, *map(str, words)])
    return shlex.join([usual, *map(str, words)])


def n_cores():
    """Return the number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Messages of a program: on a terminal one line that is updated in place, elsewhere a line per result and, in
    longer phases, at least every REPORT_SECONDS; with quiet nothing."""

    dropped = None                 # why something could not be printed
    program = False                # whether this is a program's terminal, not a user's own script or notebook

    def __init__(self, quiet=False):
        self.quiet = quiet or sys.stdout is None
        # a Windows console understands escape sequences once it is told to, in mode 7
        self.live = (Progress.program and not self.quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            and (os.name != "nt" or ctypes.windll.kernel32.SetConsoleMode(ctypes.windll.kernel32.GetStdHandle(-11), 7)))
        self.last, self.pending = time.perf_counter(), False            # pending: a line that the next text replaces

    def say(self, text, end="\n"):
        """Print a line; on a terminal it replaces the line that is updated in place. What cannot be printed, on a full
        disk or after the reader has ended, is dropped: the program continues."""
        if not self.quiet:
            try:
                before = "\r\x1b[K" if self.pending else ""
                print(before + text, end=end, flush=True)
            except (OSError, ValueError) as error:
                Progress.dropped = error
            self.pending = not end

    def step(self, text):
        """Report how far a phase is: on a terminal in place, elsewhere as a line of its own, not too often"""
        if not self.quiet and time.perf_counter() - self.last > (0.2 if self.live else REPORT_SECONDS):
            self.last = time.perf_counter()
            width = shutil.get_terminal_size().columns - 1 if self.live else None
            self.say(text[:width], end="" if self.live else "\n")


class Parser(argparse.ArgumentParser):
    """Command line of a program. --help opens with its description, as it is: the program's docstring. A wrong flag
    raises InputError."""

    def __init__(self, description=None):
        super().__init__(usage="%(prog)s [options]", description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        if message.endswith("azimuths: expected one argument"):
            message += ". Join a range that begins with a minus by =, as in --train-azimuths=-40:40"
        raise InputError(f"{message}. See --help")


def run_cli(main):
    """Call main(). What the user can correct becomes one line on stderr and exit code 2, without a traceback."""
    for stream in (stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")):
        stream.reconfigure(errors="backslashreplace")                   # for terminals that lack a letter
    Progress.program = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))         # so that temporary files are removed
    np.seterr(over="ignore", invalid="ignore", divide="ignore")         # a training checks its values, in words
    try:
        main()
        if Progress.dropped or sys.stdout is None:
            raise Progress.dropped if isinstance(Progress.dropped, OSError) else BrokenPipeError
    except MemoryError:
        sys.exit(fail("out of memory. Give less at once; of a training, lower --batch-size or --threads"))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:                    # standard output is closed, full or unread; a path cannot be looked up
        if not error.filename and sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else
                 fail(f"{error.filename or 'standard output'}: {error.strerror}. Check disk, path and permissions"))
    except Exception as error:                  # each experiment has an InputError of its own
        if not hasattr(error, "exit_code"):
            raise
        sys.exit(fail(str(error)))


def fail(message):
    """Print an error message on one line and return the exit code"""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
