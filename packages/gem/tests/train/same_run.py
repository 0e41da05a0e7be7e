"""What two runs have to have in common to be one run: everything but when and how fast they ran."""

import json
import warnings

import torch
import torch.distributed.checkpoint as dcp

from gem.train.checkpoint import latest_complete
from gem.train.run_folder import CHECKPOINTS
from gem.train.run_log import METRICS_FILE

WALL_CLOCK = ("examples_per_s", "time_frac", "model_tflops_per_s", "e2e_mfu")
RESULTS = ("steps", "examples", "progressive", "valid", "test", "efficiency")


def results(summary):
    return {key: summary[key] for key in RESULTS}


def log_rows(folder):
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]


def final_tensors(folder):
    newest = latest_complete(folder / CHECKPOINTS)
    stored = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    tensors = {k: torch.zeros(v.size, dtype=v.properties.dtype) for k, v in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(newest), no_dist=True)
    return tensors
