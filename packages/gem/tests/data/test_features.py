import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gem.data.features import Bucket, DatasetSpec, DataSpec
from gem.data.names import nearest, suggestion
from gem.data.statistics.spec import FeedbackSpec, RateStatistic
from gem.data.toml_text import toml_text
from gem_opkit.errors import ConfigError, DtypeError

MINIMAL = {
    "name": "small",
    "tables": [{"name": "user", "num_embeddings": 10}],
    "examples": {
        "rows": 4,
        "ids": [{"name": "user_id", "table": "user"}],
        "labels": [{"name": "click"}],
    },
    "splits": [{"name": "train", "start": 0, "stop": 4}],
}


def changed(path, value):
    """MINIMAL with one value replaced."""
    import copy

    spec = copy.deepcopy(MINIMAL)
    place = spec
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return spec


def test_contract_survives_toml():
    spec = DatasetSpec.model_validate(MINIMAL)
    text = toml_text(spec.model_dump(mode="json", exclude_defaults=True))
    assert DatasetSpec.model_validate(tomllib.loads(text)) == spec


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("examples", "ids", 0, "table"), "usr", "table of field 'user_id' must be declared"),
        (("examples", "ids", 0, "table"), "usr", "did you mean 'user'"),
        (("examples", "ids", 0, "fill"), 10, "fill of field 'user_id' must be a row"),
        (("splits", 0, "stop"), 5, "rows must lie in order"),
        (("examples", "labels"), [], "at least 1 item"),
        (("examples", "item"), "item_id", "item must be one of the id fields"),
        (("examples", "lable"), 1, "Extra inputs are not permitted"),
        (("tables",), [{"name": "user", "num_embeddings": 2}] * 2, "'user' must be declared once"),
        (("tables", 0, "values"), ["a"], "must name each of the 10 rows; got 1"),
        (("domains",), ["a", "b"], "domain must name a column"),
        (("entities",), [{"name": "item", "key": "item_id"}], "key must be an id field"),
        (("name",), "1 name", "String should match pattern"),
        # Added to the time of a row it would not fit in int64, and the label be known at once.
        (("examples", "labels", 0, "visible_after_ms"), 2**63 - 1, "less than or equal to 4611686"),
    ],
)
def test_contract_refuses(path, value, message):
    with pytest.raises(ValidationError, match=message):
        DatasetSpec.model_validate(changed(path, value))


def test_splits_may_not_overlap():
    splits = [{"name": "a", "start": 0, "stop": 3}, {"name": "b", "start": 2, "stop": 4}]
    with pytest.raises(ValidationError, match="split 'b'"):
        DatasetSpec.model_validate(changed(("splits",), splits))


def test_unknown_split_names_the_nearest():
    spec = DatasetSpec.model_validate(MINIMAL)
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        spec.split("trian")


def test_input_names_are_unique_over_entities():
    entity = {"name": "user", "key": "user_id", "ids": [{"name": "user_id", "table": "user"}]}
    with pytest.raises(ValidationError, match="input 'user_id' must be declared once"):
        DatasetSpec.model_validate(changed(("entities",), [entity]))


def test_boundaries_of_a_bucket_rise():
    with pytest.raises(ValidationError, match="boundaries must rise"):
        Bucket(kind="bucket", name="b", field="f", boundaries=(1, 1))


def test_options_of_the_generator_need_the_generator():
    with pytest.raises(ValidationError, match="need dataset = 'synthetic'"):
        DataSpec.model_validate({"dataset": "movielens-100k", "synthetic": {}})


def test_statistics_are_told_apart_by_kind():
    with pytest.raises(ValidationError, match="tag 'rat' found using 'kind' does not"):
        DataSpec.model_validate({"dataset": "x", "statistics": [{"kind": "rat", "name": "r"}]})


def test_prior_of_a_rate_is_a_probability():
    with pytest.raises(ValidationError, match=r"towards must lie in \(0, 1\); got 1.0"):
        RateStatistic(kind="rate", name="r", label="click", towards=1.0)


def test_feedback_ids_are_disjoint():
    with pytest.raises(ValidationError, match="positive and negative must differ"):
        FeedbackSpec(stream="s", field="f", positive=(1, 2), negative=(2,))


def test_contracts_load_without_torch_or_arrow():
    code = (
        "import sys, gem.data.features, gem.data.schema; "
        "loaded = {'torch', 'numpy', 'pyarrow'} & set(sys.modules); sys.exit(str(loaded) if loaded "
        "else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nearest_lists_what_there_is_when_nothing_is_near():
    assert nearest("zzz", ["a", "b"]) == "; there are a, b"
    assert nearest("zzz", []) == ""
    assert suggestion("zzz", ["a", "b"]) == ""
    assert suggestion("clik", ["click"]) == nearest("clik", ["click"]) == "; did you mean 'click'?"


plain = st.one_of(
    st.text(),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_toml_text_is_read_back_as_it_was(document):
    assert tomllib.loads(toml_text(document)) == document


def test_toml_text_leaves_none_out_and_refuses_what_toml_lacks():
    assert toml_text({"a": None, "b": 1}) == "b = 1\n"
    with pytest.raises(DtypeError, match="a must be a text, number, bool, list or table"):
        toml_text({"a": [None]})
