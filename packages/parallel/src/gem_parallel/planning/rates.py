"""How near a device comes to its roofline: what a forecast assumes, or has measured."""

from pydantic import Field

from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal


class PassShare(Contract):
    """Share of the roofline that a kind of work reaches."""

    forward: float = Field(gt=0, le=1, description="in the forward pass")
    backward: float = Field(gt=0, le=1, description="in the backward pass")


class Rates(Contract):
    """Shares, overheads and overlap that a forecast is made with.

    The roofline of an operator is max(FLOPs / matmul rate, bytes / memory bandwidth) of the
    topology's accelerator.
    """

    shares: dict[str, PassShare] = Field(
        description="kind of work -> share of its roofline that it reaches"
    )
    optimizer_passes: float = Field(
        default=7.0,
        gt=0,
        description="reads and writes of an element by the dense optimizer: 7 for a fused Adam, 18 "
        "for one of grouped operators; to look at the gradients before it comes on top",
    )
    optimizer_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of the memory bandwidth that the dense optimizer and its norm reach",
    )
    table_factor: float = Field(
        default=1.0,
        gt=0,
        description="measured over estimated time of reading and moving rows, where every rank "
        "holds all tables",
    )
    engine_factor: float = Field(
        default=1.0, gt=0, description="the same where an engine holds them"
    )
    host_ms: float = Field(
        default=0.0, ge=0, description="time of a step in which the device waits for the host"
    )
    launch_us: float = Field(
        default=10.0,
        ge=0,
        description="time of a collective beside its bytes and the latency of its links",
    )
    peer_us: float = Field(
        default=0.5, ge=0, description="time that each peer adds to an all-to-all, microseconds"
    )
    contention: float = Field(
        default=0.3,
        ge=0,
        description="milliseconds by which a millisecond of a hidden collective slows what it "
        "runs beside",
    )
    adapter_contention: float | None = Field(
        default=None, ge=0, description="the same between hosts; None where nobody has measured it"
    )
    prefetch_units: int = Field(
        default=1, ge=0, description="units whose parameters are gathered ahead of their use"
    )
    sources: tuple[str, ...] = Field(
        default=(), description="where the figures are from, one sentence each"
    )

    def share(self, kind: str) -> PassShare:
        """Return the share of a kind of work.

        Args:
            kind: as the operators name it.

        Returns:
            shares of the roofline, forward and backward, in (0, 1].

        Raises:
            ConfigError: no such kind.
        """
        found = self.shares.get(kind)
        if found is None:
            raise ConfigError(
                refusal(
                    "forecast",
                    "shares",
                    must=f"name the kind of work {kind!r}",
                    got=", ".join(sorted(self.shares)) or "none",
                    fix="add its share of the roofline",
                )
            )
        return found
