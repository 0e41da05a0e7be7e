"""Shape suffixes tell the truth: properties over all shapes, the messages, and Dynamo."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gem_opkit.dims import LEGEND, check_shapes, dims_markdown, write_dims_markdown
from gem_opkit.errors import DtypeError, ShapeError
from gem_opkit.testing import check_compiles_whole, check_refuses

LETTERS = sorted(LEGEND) + sorted(letter.lower() for letter in LEGEND)
sizes = st.fixed_dictionaries({letter: st.integers(0, 5) for letter in LETTERS})
suffixes = st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=5)


class Shaped:
    """Anything with a shape can be checked; no memory is needed for large ones."""

    def __init__(self, *shape):
        self.shape = shape


def size_of(letter, bound):
    if letter in "Oo":
        return bound["B" if letter == "O" else "b"] + 1
    return bound[letter]


@given(sizes, suffixes)
def test_agreeing_tensors_are_accepted_and_bound(bound, names):
    tensors = {
        f"x{i}_{suffix}": Shaped(*(size_of(letter, bound) for letter in suffix))
        for i, suffix in enumerate(names)
    }
    found = check_shapes("op", **tensors)
    used = {{"O": "B", "o": "b"}.get(letter, letter) for letter in "".join(names)}
    assert found == {letter: bound[letter] for letter in used}


@given(sizes, suffixes, st.data())
def test_one_wrong_size_is_refused_with_both_names(bound, names, data):
    shapes = [[size_of(letter, bound) for letter in suffix] for suffix in names]
    row = data.draw(st.integers(0, len(names) - 1))
    place = data.draw(st.integers(0, len(names[row]) - 1))
    letter = names[row][place]
    shapes[row][place] += 1
    tensors = {f"x{i}_{suffix}": Shaped(*shapes[i]) for i, suffix in enumerate(names)}
    # The wrong dim can only be seen where its letter stands a second time.
    group = "BO" if letter in "BO" else "bo" if letter in "bo" else letter
    if sum(one in group for one in "".join(names)) < 2:
        check_shapes("op", **tensors)
        return
    with pytest.raises(ShapeError, match=r"^op: x\d_.* has .=\d+ .*x?\d?.*; use one number of"):
        check_shapes("op", **tensors)


@given(sizes, st.text(LETTERS, min_size=1, max_size=4), st.integers(0, 6))
def test_another_number_of_dims_is_refused(bound, suffix, dims):
    x = Shaped(*[3] * dims)
    if dims == len(suffix):
        return
    with pytest.raises(ShapeError, match=rf"x_{suffix} must have {len(suffix)} dims"):
        check_shapes("op", **{f"x_{suffix}": x})


@given(st.characters(codec="utf-8"))
def test_letters_outside_the_legend_are_refused(letter):
    if letter in LETTERS or letter == "_":
        return
    with pytest.raises(ShapeError, match="must use the dim letters BOTSNPHGKVDFXMRIEAW"):
        check_shapes("op", **{f"x_{letter}": Shaped(1)})


def test_shapes_are_refused_with_helpful_messages():
    x_TD, offsets_O = torch.ones(5, 3), torch.tensor([0, 2, 5])
    check_refuses(
        [
            (
                lambda: check_shapes("attention", q_THK=Shaped(9, 2, 128), k_SGK=Shaped(9, 2, 64)),
                ShapeError,
                "^attention: k_SGK has K=64 but q_THK has K=128; "
                "use one number of head width of q and k for both$",
            ),
            (
                lambda: check_shapes("mean", offsets_O=offsets_O, lengths_B=torch.ones(3)),
                ShapeError,
                "lengths_B has B=3 but offsets_O has B=2",
            ),
            (
                lambda: check_shapes("mean", offsets_O=torch.ones(0)),
                ShapeError,
                r"offsets of an empty batch are \[0\]",
            ),
            (lambda: check_shapes("mean", w_DD=torch.ones(2, 3)), ShapeError, "D=3 and D=2"),
            (lambda: check_shapes("mean", x=x_TD), ShapeError, "x must end in an underscore"),
            (lambda: check_shapes("mean", x_=x_TD), ShapeError, "must end in an underscore"),
            (lambda: check_shapes("mean", _TD=x_TD), ShapeError, "must end in an underscore"),
            (lambda: check_shapes("mean", x_TQ=x_TD), ShapeError, "got 'Q'"),
            (lambda: check_shapes("mean", x_TD=[[1.0]]), DtypeError, "must be a tensor; got list"),
        ]
    )


def test_lower_case_is_another_dim():
    assert check_shapes("op", w_xDF=Shaped(2, 3, 4), all_XDF=Shaped(8, 3, 4)) == {
        "x": 2,
        "X": 8,
        "D": 3,
        "F": 4,
    }


def test_format_before_the_suffix_is_not_part_of_it():
    assert check_shapes("op", q_fp8_THK=Shaped(1, 2, 3)) == {"T": 1, "H": 2, "K": 3}


def test_absent_optional_tensor_is_passed_over():
    assert check_shapes("op", x_TD=Shaped(1, 2), bias_D=None) == {"T": 1, "D": 2}


def test_offsets_of_an_empty_batch_bind_zero_sequences():
    assert check_shapes("op", offsets_O=torch.tensor([0]), out_BD=torch.ones(0, 4))["B"] == 0


def test_check_traces_into_one_graph_over_several_lengths():
    def checked(values_TD, offsets_O):
        bound = check_shapes("op", values_TD=values_TD, offsets_O=offsets_O)
        return values_TD * bound["B"]

    sets = [
        (torch.ones(tokens, 4, requires_grad=True), torch.arange(batch + 1))
        for tokens, batch in ((7, 2), (9, 5), (20, 3))
    ]
    check_compiles_whole(checked, sets, max_graphs=1)


def test_conflict_is_found_inside_a_graph_too():
    def checked(x_TD, y_TD):
        check_shapes("op", x_TD=x_TD, y_TD=y_TD)
        return x_TD

    torch._dynamo.reset()
    whole = torch.compile(checked, fullgraph=True, dynamic=True, backend="eager")
    whole(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="Observed exception"):
        whole(torch.ones(3, 4), torch.ones(5, 4))


def test_legend_page_lists_every_letter_once(tmp_path):
    page = dims_markdown()
    assert re.findall(r"^\| `(.)` \|", page, flags=re.MULTILINE) == list(LEGEND)
    for letter, meaning in LEGEND.items():
        assert f"| `{letter}` | {meaning} |" in page
    write_dims_markdown(tmp_path / "dims.md")
    assert (tmp_path / "dims.md").read_text() == page
