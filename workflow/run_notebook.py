"""Execute docs/tour.ipynb from its folder; with --write, store its outputs in the file. Needs nbclient and ipykernel.

    python3 workflow/run_notebook.py            # does it still run?
    python3 workflow/run_notebook.py --write    # with MNIST at hand, since its outputs are shown on GitHub
"""
import argparse
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "docs" / "tour.ipynb"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebook")
    write = parser.parse_args().write
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError as error:
        parser.exit(2, f"error: {error.name} is not installed. Install what it needs: "
                       "python3 -m pip install nbformat nbclient ipykernel\n")
    notebook = nbformat.read(PATH, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}                                              # no times, which change at every run
    if write:
        nbformat.write(notebook, PATH)
    print(f"{PATH.name}: {len(notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
