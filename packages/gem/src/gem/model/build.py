"""From a `ModelSpec` to a module."""

from torch import nn

from gem.data.schema import BatchSchema
from gem.model.din import DinModel
from gem.model.gem import GemModel
from gem.model.spec import DinSpec, GemSpec


def build_model(spec: GemSpec | DinSpec, schema: BatchSchema) -> nn.Module:
    """Build the model that a recipe names.

    Parameters are drawn from torch's default generator: call `torch.manual_seed` before.

    Args:
        spec: the model, of either kind.
        schema: inputs, tasks and domains of the data set.

    Returns:
        a module with `forward(batch: ExampleBatch) -> logits_BA` (fp32) and `tables`, whose
        parameters the table optimizer trains; every other parameter is dense.

    Raises:
        ConfigError: spec and schema contradict each other.
        UnsupportedError: the schema has an input that no layer reads.
    """
    return GemModel(spec, schema) if isinstance(spec, GemSpec) else DinModel(spec, schema)
