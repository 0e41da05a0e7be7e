"""Find matrix products whose operand addresses are not written on every path to them.

ptxas of CUDA 12.8 computes the address of an operand that several arms of a branch share in the
first arm alone and reads it in the others, right PTX or not: such products read whatever the
registers held. Only the machine code shows it.
"""

import re

# What addresses of operands are made with; a register that was last written by anything else, or
# by nothing, holds none.
_ARITHMETIC = ("UIADD3", "UMOV", "ULOP3", "USGXT", "ULEA", "UIMAD", "USEL", "R2UR")
_NOT_WRITTEN_FIRST = ("UTMA", "SYNCS", "HGMMA", "UISETP", "BAR")
_PREDICATE = re.compile(r"^@!?U?P[\dT]+ +")
_Kinds = dict[int, frozenset[str]]


def unwritten_addresses(sass: str) -> list[str]:
    """Return the products of a kernel that may read an address nobody wrote.

    Args:
        sass: its machine code as ``nvdisasm -c`` writes it.

    Returns:
        one text each: place, instruction, register.
    """
    labels, code = _parsed(sass)
    after = [_successors(i, code[i][1], labels) for i in range(len(code))]
    states: list[_Kinds | None] = [None] * (len(code) + 1)
    states[0] = dict.fromkeys(range(64), frozenset({"none"}))
    waiting = [0]
    while waiting:
        at = waiting.pop()
        state = _written(code[at][1], states[at] or {})
        for then in after[at]:
            known = states[then]
            joined = state if known is None else {r: known[r] | state[r] for r in known}
            if joined != known:
                states[then] = joined
                waiting.append(then)
    return [
        f"{place} {text} UR{register}"
        for (place, text), state in zip(code, states, strict=False)
        for register in _addresses(text)
        if state is not None and not state[register] <= {"arithmetic"}
    ]


def _parsed(sass: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", line):
            code.append((found[1], found[2].strip()))
    return labels, code


def _successors(at: int, text: str, labels: dict[str, int]) -> list[int]:
    name = _PREDICATE.sub("", text).split()[0]
    goes_on = bool(_PREDICATE.match(text)) or re.search(r"BRA U?P\d|BRA !", text) is not None
    jumps = [labels[label] for label in re.findall(r"\.L_x_\d+", text) if label in labels]
    if name.startswith(("BRA", "BRX")):
        return jumps + ([at + 1] if goes_on else [])
    if name.startswith(("EXIT", "RET")):
        return [at + 1] if goes_on else []
    return [at + 1]


def _written(text: str, state: _Kinds) -> _Kinds:
    """Return what the uniform registers hold after an instruction."""
    name, _, rest = _PREDICATE.sub("", text).partition(" ")
    first = re.match(r"\s*UR(\d+)\s*(,|$)", rest)
    if not first or name.startswith(_NOT_WRITTEN_FIRST):
        return state
    kind = frozenset({"arithmetic" if name.split(".")[0] in _ARITHMETIC else "other"})
    many = 4 if ".128" in name else 2 if ".64" in name else 1
    may_skip = bool(_PREDICATE.match(text))
    begin = int(first[1])
    registers = range(begin, begin + many)
    return state | {r: (state[r] | kind) if may_skip else kind for r in registers}


def _addresses(text: str) -> range:
    """Return the registers in which a product finds the addresses of its operands."""
    descriptor = re.search(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", text)
    if not descriptor:
        return range(0)
    begin = int(descriptor[2])
    # The first operand may stand in registers.
    return range(begin + 2 if descriptor[1] else begin, begin + 4)
