"""Which versions of other models' embeddings and predictions a run is trained with."""

from pathlib import Path

from gem.config import RunConfig
from gem.data.embedding_files import read_manifest
from gem.data.teacher import teacher_fingerprint


def with_versions(config: RunConfig) -> RunConfig:
    """Write into a config which models its embeddings and predictions are of.

    The run's own config then names them, and whoever opens the run later refuses others.

    Args:
        config: of a run that begins or goes on.

    Returns:
        the config with every fingerprint; one that the recipe names stays.

    Raises:
        DataError: a folder that holds no embeddings or predictions.
    """
    data = config.data
    if not data.user_embeddings and data.teacher is None:
        return config
    update: dict[str, object] = {
        "user_embeddings": {
            name: read
            if read.fingerprint is not None
            else read.model_copy(
                update={
                    "fingerprint": read_manifest(
                        Path(read.folder), f"data.user_embeddings.{name}.folder"
                    ).fingerprint
                }
            )
            for name, read in data.user_embeddings.items()
        }
    }
    if data.teacher is not None and data.teacher.fingerprint is None:
        found = teacher_fingerprint(Path(data.teacher.folder))
        update["teacher"] = data.teacher.model_copy(update={"fingerprint": found})
    return config.model_copy(update={"data": data.model_copy(update=update)})
