"""Train a tiny model with only the wheels of this set installed; exit status 1 if it is wrong."""

import sys
import tempfile
from pathlib import Path

from gem.config import load_recipe
from gem.train.held_out import evaluate_folder
from gem.train.loop import train

SETTINGS = ["data.synthetic.rows=300", "data.synthetic.users=40", "train.device=cpu"]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = load_recipe("synthetic-debug", SETTINGS)
        run, data = Path(folder) / "run", Path(folder) / "data"
        summary = train(config, run, data_root=data)
        again = evaluate_folder(run, data_root=data)
    learned = summary["examples"] == 240 and summary["test"]["click"]["ne"] is not None
    return 0 if learned and again["test"] == summary["test"] else 1


if __name__ == "__main__":
    sys.exit(main())
