"""Curves on Weights & Biases, where the recipe has ``[train.wandb]``. The only place that loads it.

Needs ``pip install 'gem-trainer[wandb]'``. The run keeps its id in its folder, so that a continued
run goes on with the same curves.
"""

import importlib
import importlib.util
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.train.whole_file import write_whole
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

_log = logging.getLogger(__name__)

_ID_FILE = "wandb-id.txt"


def check_wandb() -> None:
    """Refuse a recipe that asks for it where it is not installed.

    Raises:
        UnsupportedError: names the package to install.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UnsupportedError(
            refusal(
                "gem train",
                "train.wandb",
                must="find the package wandb",
                got="none",
                fix="pip install 'gem-trainer[wandb]', or leave [train.wandb] out",
            )
        )


class WandbLog:
    """Sends numbers to one run there.

    Args:
        config: of the run; has ``[train.wandb]``.
        folder: of the run; its files lie there, below ``wandb/``.

    Raises:
        UnsupportedError: wandb is not installed.
        ConfigError: it cannot begin a run, such as without a login.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        spec = config.train.wandb
        if spec is None:
            raise UnsupportedError(
                refusal(
                    "WandbLog",
                    "config",
                    must="have [train.wandb]",
                    got="none",
                    fix="use RunLog without it",
                )
            )
        check_wandb()
        wandb: Any = importlib.import_module("wandb")
        id_file = folder / _ID_FILE
        if not id_file.exists():
            write_whole(id_file, secrets.token_hex(8))
        try:
            self._run: Any = wandb.init(
                project=spec.project,
                entity=spec.entity,
                mode=spec.mode,
                name=folder.name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True),
            )
        except Exception as fault:  # it has classes of its own for no login and no network
            raise ConfigError(
                refusal(
                    "gem train",
                    "train.wandb",
                    must="be able to begin a run there",
                    got=f"{type(fault).__name__}: {fault}",
                    fix='log in with wandb login, or set train.wandb.mode = "offline"',
                )
            ) from fault

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers. After the first failure nothing more is sent: training is worth more.

        Args:
            step: of the run.
            numbers: name -> value.
        """
        if self._run is None:
            return
        try:
            self._run.log(dict(numbers), step=step)
        except Exception as fault:  # noqa: BLE001 - told, and the files of the run have it all
            _log.warning("wandb takes no more rows (%s): the run goes on without it", fault)
            self._run = None

    def close(self) -> None:
        """End the run there; waits until everything is sent or written."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as fault:  # noqa: BLE001 - as above
            _log.warning("wandb has not taken everything (%s): see its folder", fault)
