#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "imageio>=2.31.0"]
# ///
"""Make a data set of your own pictures: turn FOLDER/<class>/*.png or *.jpg into four files like MNIST's in OUT, which
the digit experiments train on.

Each picture becomes gray, light on dark, scaled so that its ink fits into 20x20 px, and moved so that the ink's center
of mass lies at the center of 28x28 px, as MNIST's digits are. A seventh of each class is kept for testing.

    python3 make_idx.py drawings data                          # seconds
    python3 affnist_capsnet.py --data-dir data                 # then train on it
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
from lab.data import ENDINGS, class_folders, split_classes, text_lines, visible, write_data_set
from lab.messages import InputError, Parser, command_line, counted, run_cli

IDX_NAME = r"(.*?[-.]?)(train|t10k|test)[-.](images|labels)[-.]idx[13][-.]ubyte(?:\.gz)?"      # as experiments read it


def main():
    parser = Parser(description=__doc__)
    parser.usage = "%(prog)s FOLDER OUT [--seed N]"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="its folders are the classes and hold the pictures")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the four files, labels.txt and "
                        "test-files.txt, the pictures of the test images in their order")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of test pictures (default: 0)")
    args = parser.parse_args()
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: must be at least 0")
    if any(re.fullmatch(IDX_NAME, path.name) for path in args.out.glob("*")):
        raise InputError(f"{args.out}: holds a data set. Give another folder, or remove its files")
    folders = class_folders(args.folder)
    try:
        names = text_lines(folder.name for folder in folders)
    except InputError as error:
        raise InputError(f"{args.folder}: {error}") from None
    parts, tested = split_classes(folders, args.seed)
    listed = text_lines((path.relative_to(args.folder).as_posix() for path in tested), "backslashreplace")
    write_data_set(args.out, parts, {"labels.txt": names, "test-files.txt": listed})
    n_train = min(12_000, 100 * len(parts["train"]))                    # each picture a hundred times in an epoch
    script = Path(sys.argv[0]).parent / "affnist_capsnet.py"
    command = command_line(script, "--data-dir", args.out, "--n-train", n_train)
    print(f"wrote {args.out}: {len(folders)} classes, {len(parts['train'])} training and {len(parts['t10k'])} test "
          f"images, whose files are listed in test-files.txt\n  train on it: {command}")
    if left := [path.name for folder in folders for path in visible(folder) if path.suffix.lower() not in ENDINGS]:
        print(f"left out {counted(len(left), 'file')} that {'are' if len(left) > 1 else 'is'} neither PNG nor "
              f"JPEG: {', '.join(sorted(left)[:5])}{', ...' * (len(left) > 5)}")


if __name__ == "__main__":
    run_cli(main)
