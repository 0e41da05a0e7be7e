"""Write down what a forward pass keeps: the profile that a budget is spent on.

Run it on tensors without memory (`gem_parallel.dry_run.fakes`): every tensor that an operator
makes is held until the end, so that no two of them share an address.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.recompute.packing import PACK_ABOVE_BYTES, Packing, can_be_packed
from gem_parallel.recompute.profile import Call, Profile, Region
from gem_parallel.recompute.replay import IGNORED

_CAST = torch.ops.aten._to_copy.default


def record(
    module: nn.Module,
    regions: Sequence[str],
    run: Callable[[], object],
    *,
    alive: Iterable[Tensor] = (),
    packing: Packing | None = None,
    pack_above_bytes: int = PACK_ABOVE_BYTES,
) -> Profile:
    """Run a forward pass and write down what it keeps.

    Args:
        module: whose parts are regions; its parameters and buffers are not counted.
        regions: qualified names of parts that do not lie within one another. A part that does not
            run is left out.
        run: runs the forward pass, gradients enabled.
        alive: tensors that are there anyway, such as the batch.
        packing: shortens what is kept; None for none.
        pack_above_bytes: size of a storage from which it is packed.

    Returns:
        the profile.

    Raises:
        ConfigError: a region within another one, one that the module does not have, or one that
            runs twice.
    """
    parts = check_regions(module, regions)
    book = _Book([*module.buffers(), *alive], module.parameters(), packing, pack_above_bytes)
    with _recorded(parts, book), book.outside_hooks(), _Watch(book):
        run()
    return book.profile()


def check_regions(module: nn.Module, regions: Sequence[str]) -> dict[str, nn.Module]:
    """Look regions up.

    Args:
        module: that has them.
        regions: qualified names.

    Returns:
        name -> part.

    Raises:
        ConfigError: a name that the module does not have, or one within another.
    """
    known = dict(module.named_modules())
    for name in regions:
        around = [other for other in regions if name.startswith(f"{other}.")]
        if name not in known or not name or around:
            raise ConfigError(
                refusal(
                    "recompute",
                    "regions",
                    must="name parts of the model, none within another",
                    got=repr(name) + (f" within {around[0]!r}" if around else ""),
                    fix="correct or remove it",
                )
            )
    return {name: known[name] for name in regions}


class _Open:
    """A region that is being run."""

    def __init__(self, name: str, inputs: tuple[int, ...]) -> None:
        self.name, self.inputs = name, inputs
        self.calls: list[Call] = []
        self.saved: list[int] = []
        self.needed_calls = 0
        self.places: Counter[str] = Counter()
        self.saved_by: dict[int, list[int]] = {}


class _Book:
    """What has been seen: storages by number, regions, and what lies outside."""

    def __init__(
        self,
        alive: Iterable[Tensor],
        weights: Iterable[Tensor],
        packing: Packing | None,
        pack_above_bytes: int,
    ) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []
        self._bytes: dict[int, int] = {}
        self._packed: dict[int, int] = {}
        self._written: set[int] = set()
        self._packing, self._pack_above_bytes = packing, pack_above_bytes
        self._alive: set[int] = set()
        own = list(weights)
        self._alive = {n for t in (*alive, *own) for n in self.numbers([t])}
        self._weights = {self._address(weight) for weight in own}
        self._regions: list[_Open] = []
        self._outside: list[list[int]] = [[]]
        self.now: _Open | None = None

    def numbers(self, values: Any) -> list[int]:
        """Numbers of the storages of all tensors in some values, those that are alive left out."""
        found: list[int] = []
        for given in tree_iter(values):
            if not isinstance(given, Tensor) or given.layout != torch.strided:
                continue
            tensor = given.to_local() if isinstance(given, DTensor) else given
            storage = tensor.untyped_storage()
            number = self._numbers.setdefault(storage._cdata, len(self._numbers))
            if number not in self._bytes:
                self._held.append(storage)
                self._bytes[number] = storage.nbytes()
            if number not in self._alive and self._bytes[number] and number not in found:
                found.append(number)
        return found

    @staticmethod
    def _address(tensor: Tensor) -> int:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return own.untyped_storage()._cdata if own.layout == torch.strided else 0

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor."""
        numbers = self.numbers([tensor])
        if self.now is None:
            self._outside[-1] += [n for n in numbers if n not in self._outside[-1]]
        else:
            self.now.saved += [n for n in numbers if n not in self.now.saved]
            self.now.needed_calls = len(self.now.calls)
            self.now.saved_by.setdefault(len(self.now.calls), []).extend(numbers)
            self.may_pack(tensor, numbers)
        return tensor

    def may_pack(self, tensor: Tensor, numbers: Sequence[int]) -> None:
        """Note that a tensor could be packed."""
        if self._packing is not None and can_be_packed(tensor, self._pack_above_bytes):
            for number in numbers:
                elements = self._bytes[number] // tensor.element_size()
                self._packed[number] = self._packing.bytes_of(elements)

    def outside_hooks(self) -> saved_tensors_hooks:
        """Hooks that see everything that autograd keeps, within regions too."""
        return saved_tensors_hooks(self.save, lambda tensor: tensor)

    def enter(self, name: str, given: Any) -> None:
        """Begin a region."""
        if any(region.name == name for region in self._regions) or self.now is not None:
            raise ConfigError(
                refusal(
                    "recompute",
                    "regions",
                    must="name parts that run once, one after another",
                    got=f"{name!r}, which runs again or within another",
                    fix="name its parts in place of it",
                )
            )
        for tensor in given:
            self.may_pack(tensor, self.numbers([tensor]))
        self.now = _Open(name, tuple(self.numbers(given)))
        self._regions.append(self.now)
        self._outside.append([])

    def leave(self) -> None:
        """End it."""
        self.now = None

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        read = self.numbers((args, kwargs))
        for schema, value in zip(func._schema.arguments, args, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                self._written |= {*self.numbers([value])}
        numbers = self.numbers(out)
        # A copy of a weight in another dtype: made again at once.
        of_weights = func is _CAST and self._address(args[0]) in self._weights
        if self.now is None or not any(True for _ in _tensors(out)):
            return
        made = tuple(n for n in numbers if n not in read)
        own, name = self.now, str(func)
        for tensor in _tensors(out) if not of_weights else ():
            self.may_pack(tensor, [n for n in self.numbers([tensor]) if n in made])
        own.calls.append(
            Call(
                name,
                own.places[name],
                _cost(func, args, kwargs, out) if made else Cost(0, 0),
                made,
                # How many casts there are depends on who has cast the weights before.
                can_be_kept=bool(made) and func is not _CAST,
            )
        )
        own.places[name] += 1

    def profile(self) -> Profile:
        """All of it."""
        regions = [
            Region(
                r.name,
                tuple(
                    Call(c.name, c.place, c.cost, c.made, c.can_be_kept and self._whole(c))
                    for c in r.calls
                ),
                r.inputs,
                tuple(r.saved),
                r.needed_calls,
                tuple(tuple(part) for part in r.saved_by.values()),
            )
            for r in self._regions
        ]
        return Profile(
            tuple(regions),
            tuple(tuple(part) for part in self._outside),
            dict(self._bytes),
            dict(self._packed),
        )

    def _whole(self, call: Call) -> bool:
        return not self._written & {*call.made}


class _Watch(TorchDispatchMode):
    def __init__(self, book: _Book) -> None:
        super().__init__()
        self._book = book

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in IGNORED:
            self._book.see(func, args, kwargs, out)
        return out


@contextmanager
def _recorded(parts: dict[str, nn.Module], book: _Book) -> Iterator[None]:
    """Let regions tell when they begin and end."""

    def wrapped(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            book.enter(name, [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])
            try:
                return forward(*args, **kwargs)
            finally:
                book.leave()

        return run

    try:
        for name, part in parts.items():
            part.forward = wrapped(name, part.forward)
        yield
    finally:
        for part in parts.values():
            part.__dict__.pop("forward", None)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_iter(values) if isinstance(each, Tensor))


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> Cost:
    """FLOPs by the formula that torch's counter has, and bytes of all tensors."""
    formula = flop_registry.get(func._overloadpacket)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    moved = sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
        for t in _tensors((args, kwargs, out))
    )
    return Cost(flops, moved)
