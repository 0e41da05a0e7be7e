"""Every bad input that a person can give, as one table: the tests run it, the page shows it.

`python packages/gem/tests/bad_inputs.py` writes docs/bad-input.md anew. A case makes its fault in a
folder that holds a sound recipe (`recipe.toml`), its data set (`data/`) and a finished run of it
(`run/`), and names the command that meets the fault.
"""

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem.cli import main
from gem.data.embedding_files import Manifest, write_manifest
from gem.data.prepare import prepare
from gem.data.synthetic_spec import SyntheticSpec

PAGE = Path(__file__).parents[3] / "docs" / "bad-input.md"

RECIPE = """
[data]
dataset = "synthetic"
folder = "data"
[data.streams.clicks]
max_events = 6
[[data.statistics]]
kind = "rate"
name = "item_rate"
keys = ["item_id"]
label = "click"
towards = 0.3
[model]
kind = "din"
[train]
batch_examples = 100
checkpoint_every_steps = 2
threads = 1
device = "cpu"
"""
TRAIN = ("train", "recipe.toml", "--out", "new")
RESUME = ("train", "recipe.toml", "--out", "run", "--resume")
PREPARE = ("data", "prepare", "log.toml", "--out", "new")
PREDICT = ("predict", "run", "--out", "new")
SCORE = ("score", "artefact", "request.json")
BALANCE = ("--set", "parallel.balance=global", "--set", "parallel.base_batch=1024")
EMBEDDED = ("--set", "data.user_embeddings.up.folder=embedded")
EXAMPLES = "data/examples/part-00000.parquet"
# Two hosts of eight, and nothing between them.
MACHINES = """
hosts = 2
ranks_per_host = 8
hosts_per_zone = 2
host_tier = { name = "nvlink", gbytes_per_s = 450.0, latency_us = 5.0 }
"""


@dataclass(frozen=True)
class Case:
    """A fault, and the command that meets it.

    Attributes:
        group: heading on the page.
        name: what is wrong, in words.
        words: of the command.
        make: brings the fault about, in the current folder.
        code: exit code.
    """

    group: str
    name: str
    words: tuple[str, ...]
    make: Callable[[], object] = lambda: None
    code: int = 2


def write(path: str, content: str | bytes) -> Callable[[], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda: (Path(path).parent.mkdir(exist_ok=True), Path(path).write_bytes(data))


def asked(candidates: dict[str, list[Any]], **more: object) -> Callable[[], object]:
    """A request in a file."""
    return write("request.json", json.dumps({"user": 1, "candidates": candidates, **more}))


def own_log(words: str, log: str | bytes = "user,item,time,click\n") -> Callable[[], object]:
    """A CSV file and its declaration."""
    head = 'name = "mine"\n[examples]\nfile = "log.csv"\nuser = "user"\nitem = "item"\n'
    head += 'time = "time"\ntime_format = "iso"\nlabels = [{ name = "click", column = "click" }]\n'
    return lambda: (write("log.toml", head + words)(), write("log.csv", log)())


def replaced(path: str, before: str, after: str) -> Callable[[], None]:
    def make() -> None:
        text = Path(path).read_text()
        assert before in text, f"{before!r} is not in {path}"
        Path(path).write_text(text.replace(before, after, 1))

    return make


def column(name: str, change: Callable[[pa.ChunkedArray], pa.Array], file: str = EXAMPLES):
    """Another column of the same name in a Parquet file."""

    def make() -> None:
        table = pq.read_table(file)
        place = table.schema.get_field_index(name)
        pq.write_table(table.set_column(place, name, change(table.column(name))), file)

    return make


def value(name: str, row: int, what: object, file: str = EXAMPLES) -> Callable[[], None]:
    """One other value in a column."""

    def change(old: pa.ChunkedArray) -> pa.Array:
        values = old.to_pylist()
        values[row] = what
        return pa.array(values, old.type)

    return column(name, change, file)


def cut(path: str, at: int) -> Callable[[], object]:
    return lambda: Path(path).write_bytes(Path(path).read_bytes()[:at])


def flip(path: str) -> Callable[[], None]:
    def make() -> None:
        content = bytearray(Path(path).read_bytes())
        content[len(content) // 2] ^= 1
        Path(path).write_bytes(content)

    return make


def twice_the_key() -> None:
    path = "data/entities/item/part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(3, 1)]), path)


def no_rows() -> None:
    for file in Path("data").glob("*/*.parquet"):
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    path = Path("data/dataset.toml")
    path.write_text(re.sub(r"(rows|start|stop) = \d+", r"\1 = 0", path.read_text()))


def strings_in_a_second_file() -> None:
    table = pq.read_table(EXAMPLES)
    pq.write_table(table.slice(0, 300), EXAMPLES)
    place = table.schema.get_field_index("item_id")
    other = table.set_column(place, "item_id", table.column("item_id").cast(pa.string()))
    pq.write_table(other.slice(300), EXAMPLES.replace("00000", "00001"))


def unsorted() -> None:
    table = pq.read_table(EXAMPLES)
    pq.write_table(pa.concat_tables([table.slice(200), table.slice(0, 200)]), EXAMPLES)


def made_before() -> None:
    own_log("", "user,item,time,click\na,x,2025-01-01,0\n")()
    prepare("log.toml", "mine")
    with Path("log.csv").open("a") as file:
        file.write("b,x,2025-01-02,1\n")


def only_checkpoint_flipped() -> None:
    shutil.rmtree("run/checkpoints/step-2")
    flip("run/checkpoints/step-4/__0_0.distcp")()


def all_checkpoints_cut() -> None:
    for path in Path("run/checkpoints").glob("*/__0_0.distcp"):
        path.write_bytes(path.read_bytes()[:-1])


def renamed(before: str, after: str) -> Callable[[], None]:
    def make() -> None:
        table = pq.read_table(EXAMPLES)
        names = [after if name == before else name for name in table.column_names]
        pq.write_table(table.rename_columns(names), EXAMPLES)

    return make


def embeddings_of() -> None:
    """A folder of embeddings, in which nobody has one."""
    manifest = Manifest(
        fingerprint="a" * 64,
        version="0",
        recipe="up",
        dataset="synthetic",
        width=4,
        every_hours=24.0,
        begin_ms=0,
        until_ms=0,
    )
    Path("embedded").mkdir()
    write_manifest(Path("embedded"), manifest)


def set_key(key: str) -> tuple[str, ...]:
    return (*TRAIN, "--set", key)


def times(column: pa.ChunkedArray) -> pa.Array:
    return column.cast(pa.timestamp("ms"))


CASES = (
    Case("The command line", "an unknown command", ("trian", "recipe.toml")),
    Case("The command line", "a missing argument", ("train",)),
    Case("The command line", "an unknown option", ("train", "recipe.toml", "--sed", "3")),
    Case("The command line", "an option of the wrong type", (*TRAIN, "--seed", "one")),
    Case("The command line", "--debug behind the command", (*TRAIN, "--debug")),
    Case("The command line", "--set without a value", set_key("train.passes")),
    Case("The command line", "--set below a number", set_key("train.passes.x=1")),
    Case("The command line", "--set beyond an array", set_key("data.statistics.7.name=x")),
    Case("A plan", "more ranks than there are", ("plan", "--gpus", "4104")),
    Case("A plan", "a host half used", ("plan", "--gpus", "12")),
    Case("A plan", "an axis that no plan has", ("plan", "--gpus", "8", "--axis", "expert=4")),
    Case("A plan", "an unknown axis", ("plan", "--gpus", "8", "--axis", "shards=4")),
    Case("A plan", "no such machines", ("plan", "--gpus", "8", "--topology", "h200x9")),
    Case(
        *("A plan", "machines without links between their hosts"),
        ("plan", "--gpus", "16", "--topology", "machines.toml"),
        write("machines.toml", MACHINES),
    ),
    Case("A plan", "data that is not there yet", ("plan", "ml100k-time", "--gpus", "8")),
    Case("A plan", "a model that is not counted", ("plan", "recipe.toml", "--gpus", "8")),
    Case(
        *("A plan", "a balance with nothing to deal"),
        (*("plan", "synthetic-debug", "--gpus", "8"), *BALANCE),
    ),
    Case(
        *("A memory budget", "parts that are compiled"),
        ("memory", "synthetic-debug", "--budget", "1", "--set", "train.compile=inductor"),
    ),
    Case(
        *("A memory budget", "experts spread over ranks"),
        ("memory", "synthetic-debug", "--budget", "1", "--set", "parallel.expert=2"),
    ),
    Case(
        *("A memory budget", "data for it that is not there"),
        ("memory", "ml100k-time", "--budget", "1"),
    ),
    Case(
        "A bench",
        "an implementation that does not exist",
        ("bench", "step", "synthetic-debug", "--impl", "cuda"),
    ),
    Case(
        "A bench",
        "a picture without a profile",
        ("bench", "step", "synthetic-debug", "--svg", "step.svg", "--profile", "0"),
    ),
    Case(
        "A bench",
        "kernels compared where none runs",
        ("bench", "step", "synthetic-debug", "--check", "50", "--set", "train.device=cpu"),
    ),
    Case(
        *("A bench", "a document of a long run"),
        ("bench", "step", "synthetic-debug", "--endure", "5", "--out", "step.json"),
    ),
    Case(
        *("A bench", "a warm-up of a comparison"),
        ("bench", "step", "synthetic-debug", "--check", "50", "--warmup", "2"),
    ),
    Case("The recipe", "no such recipe", ("train", "synthetic-debugg")),
    Case("The recipe", "no such file", ("train", "recipes/mine.toml")),
    Case("The recipe", "a folder in its place", ("train", "data")),
    Case("The recipe", "not TOML", TRAIN, write("recipe.toml", "[data]\ndataset = synthetic\n")),
    Case("The recipe", "not UTF-8", TRAIN, write("recipe.toml", b'name = "caf\xe9"\n')),
    Case("The recipe", "an empty file", TRAIN, write("recipe.toml", "")),
    Case("The recipe", "an unknown key", set_key("train.batchsize=3")),
    Case("The recipe", "an unknown key, deep down", set_key("model.tower_width=[8]")),
    Case("The recipe", "a value of the wrong type", set_key("train.batch_examples=many")),
    Case("The recipe", "a whole number beyond 64 bits", set_key(f"train.passes={10**22}")),
    Case("The recipe", "a number beyond 32 bits", set_key("train.tables.lr=1e300")),
    Case("The recipe", "a value out of its range", set_key("train.batch_examples=0")),
    Case("The recipe", "an unknown kind of model", set_key("model.kind=gen")),
    Case("The recipe", "two keys that do not fit", set_key("train.window_steps=30")),
    Case(
        *("The recipe", "an early stop without evaluations"),
        set_key("train.interim.stop_after=3"),
    ),
    Case(
        *("The recipe", "an evaluation of a task that is not there"),
        (*set_key("train.interim.every_steps=2"), "--set", "train.interim.task=clik"),
    ),
    Case("The recipe", "an input named twice", set_key('data.inputs=["item_id", "item_id"]')),
    Case(
        *("The recipe", "a field of a stream named twice"),
        set_key('data.streams.clicks.fields=["item_id", "item_id"]'),
    ),
    Case("The recipe", "an input that is not there", set_key('data.inputs=["itm_id"]')),
    Case("The recipe", "a stream that is not there", set_key("data.streams.clcks={}")),
    Case("The recipe", "a label that is not there", set_key("data.statistics.0.label=clik")),
    Case(
        *("The recipe", "a base that is not there"),
        *(TRAIN, write("recipe.toml", 'base = "other.toml"\n')),
    ),
    Case("The recipe", "a number format that is not built", set_key("precision.default=mxfp8")),
    Case("The recipe", "a low precision that does not exist", set_key("precision.recipe=mxfp8")),
    Case("The recipe", "copy engines on a CPU", set_key("parallel.gathers=copy_engine")),
    Case("The recipe", "micro-batches balanced in one part", set_key("parallel.balance=local")),
    Case("The recipe", "a plan for another number of ranks", set_key("parallel.shard=2")),
    Case(
        *("The recipe", "a plan whose two meshes differ"),
        (*set_key("parallel.shard=4"), "--set", "parallel.table_shard=3"),
    ),
    Case(
        *("The recipe", "sharded tables whose rows are drawn in order"),
        (*set_key("parallel.shard=2"), "--set", "parallel.table_shard=2"),
    ),
    Case("The data set", "no such folder", TRAIN, lambda: shutil.rmtree("data")),
    Case("The data set", "another data set", set_key("data.dataset=movielens-100k")),
    Case(
        *("The data set", "a name without a folder"),
        ("train", "own-log", "--out", "new"),
    ),
    Case(
        *("The data set", "a contract that is not TOML", TRAIN),
        replaced("data/dataset.toml", "name = ", "name : "),
    ),
    Case(
        *("The data set", "an unknown key in its contract", TRAIN),
        replaced("data/dataset.toml", "num_embeddings", "num_embedings"),
    ),
    Case(
        *("The data set", "fewer rows than declared", TRAIN),
        replaced("data/dataset.toml", "rows = 400", "rows = 401"),
    ),
    Case("The data set", "no files", TRAIN, lambda: shutil.rmtree("data/events/clicks")),
    Case("The data set", "a file cut short", TRAIN, cut(EXAMPLES, 1000)),
    Case("The data set", "a missing column", TRAIN, renamed("click", "klick")),
    Case(
        *("The data set", "ids that are strings", TRAIN),
        column("item_id", lambda old: old.cast(pa.string())),
    ),
    Case(
        "The data set", "ids that are strings in the second file", TRAIN, strings_in_a_second_file
    ),
    Case("The data set", "times that are no integers", TRAIN, column("time_ms", times)),
    Case("The data set", "an id out of range", TRAIN, value("item_id", 17, 31)),
    Case("The data set", "a negative id", TRAIN, value("item_id", 17, -1)),
    Case("The data set", "a label outside {0, 1}", TRAIN, value("click", 5, 2.0)),
    Case("The data set", "a null user", TRAIN, value("user_id", 3, None)),
    Case("The data set", "a null time", TRAIN, value("time_ms", 3, None)),
    Case("The data set", "examples out of order", TRAIN, unsorted),
    Case("The data set", "an entity twice", TRAIN, twice_the_key),
    Case("The data set", "no examples", TRAIN, no_rows),
    Case(
        *("The data set", "no training rows", TRAIN),
        replaced("data/dataset.toml", 'name = "train"', 'name = "training"'),
    ),
    Case("The data set", "an unknown name", ("data", "prepare", "movielens", "--out", "other")),
    Case(
        "The data set",
        "raw files that are not there",
        (*("data", "prepare", "movielens-100k", "--source", "raw", "--out", "other"),),
    ),
    Case(
        *("The data set", "a log that does not grow"),
        (*("data", "prepare", "synthetic", "--out", "other"), *("--grown-from", "data")),
    ),
    Case(
        *("The data set", "a grown one for examples"),
        (*PREDICT, "--data", "data"),
    ),
    Case("The data set", "a place that is taken", ("data", "prepare", "synthetic", "--out", "run")),
    Case("The data set", "data check of something else", ("data", "check", "run")),
    Case(
        *("A log of one's own", "a column whose name is no name", PREPARE),
        own_log('numbers = ["Preis EUR"]\n'),
    ),
    Case(
        *("A log of one's own", "another separator", PREPARE),
        own_log("", "user;item;time;click\na;x;2025-01-01;0\n"),
    ),
    Case(
        *("A log of one's own", "another encoding", PREPARE),
        own_log("", "user,item,time,click\na,Händy,2025-01-01,0\n".encode("cp1252")),
    ),
    Case(
        *("A log of one's own", "a column that is called otherwise", PREPARE),
        own_log("", "user,item,time,clicked\na,x,2025-01-01,0\n"),
    ),
    Case(
        *("A log of one's own", "a label in words", PREPARE),
        own_log("", "user,item,time,click\na,x,2025-01-01,\na,x,2025-01-02,yes\n"),
    ),
    Case(
        *("A log of one's own", "a number with a unit", PREPARE),
        own_log('numbers = ["price"]\n', "user,item,time,click,price\na,x,2025-01-01,0,1 EUR\n"),
    ),
    Case(
        *("A log of one's own", "a time of another form", PREPARE),
        own_log("", "user,item,time,click\na,x,2025-01-01,0\na,x,01.02.2025,0\n"),
    ),
    Case(
        *("A log of one's own", "a row without a user", PREPARE),
        own_log("", "user,item,time,click\n,x,2025-01-01,0\n"),
    ),
    Case(
        *("A log of one's own", "a file that has changed since"),
        *(("data", "prepare", "log.toml", "--out", "mine"), made_before),
    ),
    Case("The run", "a folder that is in use", ("train", "recipe.toml", "--out", "run")),
    Case(
        "The run", "a file in place of the folder", ("train", "recipe.toml", "--out", "recipe.toml")
    ),
    Case("The run", "a path below a file", ("train", "recipe.toml", "--out", "recipe.toml/run")),
    Case("The run", "going on with other settings", (*RESUME, "--set", "train.dense.lr=0.5")),
    Case("The run", "going on with other data", RESUME, value("click", 5, None)),
    Case("The run", "a settings file that was damaged", RESUME, cut("run/config.toml", 30)),
    Case(
        "The run",
        "a checkpoint with one flipped bit",
        ("eval", "run"),
        flip("run/checkpoints/step-4/__0_0.distcp"),
    ),
    Case(
        *("The run", "the only checkpoint with one flipped bit", ("eval", "run")),
        only_checkpoint_flipped,
    ),
    Case("The run", "no checkpoint that is whole", RESUME, all_checkpoints_cut),
    Case("The run", "no such run", ("eval", "nowhere")),
    Case(
        *("The run", "weights to a file that is there"),
        ("export-weights", "run", "--out", "recipe.toml"),
    ),
    Case(
        *("The run", "a run without a checkpoint", ("eval", "run")),
        lambda: shutil.rmtree("run/checkpoints"),
    ),
    Case(
        *("The run", "a split named twice"),
        (*PREDICT, "--split", "test", "--split", "test"),
    ),
    Case(
        *("The run", "a link that leads nowhere", PREDICT),
        lambda: Path("new").symlink_to("nowhere"),
    ),
    Case(
        *("Models that read one another", "embeddings of another version of the model"),
        (*TRAIN, *EMBEDDED, "--set", f"data.user_embeddings.up.fingerprint={'b' * 64}"),
        embeddings_of,
    ),
    Case(
        *("Models that read one another", "a folder without embeddings"),
        (*TRAIN, "--set", "data.user_embeddings.up.folder=data"),
    ),
    Case(
        *("Models that read one another", "embeddings for a model that reads none"),
        (*TRAIN, *EMBEDDED),
        embeddings_of,
    ),
    Case(
        *("Models that read one another", "a teacher that has predicted nothing"),
        (*TRAIN, "--set", "data.teacher.folder=data"),
    ),
    Case(
        *("Models that read one another", "tables of a run that is not there"),
        (*TRAIN, "--set", "train.start_tables.run=nowhere"),
    ),
    Case(
        *("Models that read one another", "refreshes of a model that is none of users"),
        (*PREDICT, "--every", "24"),
    ),
    Case(
        *("Models that read one another", "stages without a model of users"),
        ("stages", "two.toml"),
        write(
            "two.toml",
            '[upstream]\nrecipe = "synthetic-debug"\n[rankers.one]\nrecipe = "synthetic-debug"\n',
        ),
    ),
    Case(
        *("Models that read one another", "a slice by a column that holds no ids"),
        ("data", "slice", "data", "--where", "price=1", "--out", "new"),
    ),
    Case("Serving", "an artefact to a folder in use", ("export", "run", "--out", "data")),
    Case("Serving", "no artefact", ("score", "nowhere", "request.json")),
    Case(
        *("Serving", "an artefact of another version", SCORE),
        replaced("artefact/artefact.json", '"gem_version": "', '"gem_version": "9.'),
    ),
    Case(
        *("Serving", "weights that are not those of the manifest", SCORE),
        replaced("artefact/artefact.json", '"fingerprint": "', '"fingerprint": "0'),
    ),
    Case(
        *("Serving", "a file of an artefact that is gone", SCORE),
        lambda: Path("artefact/tables.safetensors").unlink(),
    ),
    Case("Serving", "a number format that is none", (*SCORE, "--precision", "fp8")),
    Case("Serving", "a limit that is none", ("serve", "artefact", "--limit", "max_candidate=9")),
    Case("Serving", "malformed JSON", SCORE, write("request.json", '{"user": 1,')),
    Case("Serving", "a request without an item", SCORE, asked({"position": [1]})),
    Case("Serving", "an unknown input", SCORE, asked({"item_id": [1], "positon": [1]})),
    Case("Serving", "an id that is a fraction", SCORE, asked({"item_id": [1, 2.5]})),
    Case("Serving", "a million candidates", SCORE, asked({"item_id": [1] * 1_000_000})),
    Case(
        *("Serving", "an embedding that the ranker does not read", SCORE),
        asked(
            {"item_id": [1]},
            vectors={"cached": {"vector": [1.0], "fingerprint": "0", "valid_from_ms": 0}},
        ),
    ),
    Case(
        *("Serving", "neighbours of vectors that are none"),
        ("nearest", "data", "data/entities/item/part-00000.parquet", "--out", "new.parquet"),
    ),
    Case("Serving", "items of a model that has none", ("export-items", "run", "--out", "new")),
)


def make_world(folder: Path) -> None:
    """A sound recipe, its data set and a finished run of it."""
    options = SyntheticSpec(rows=400, users=40, items=30, categories=4, max_backlog_events=12)
    prepare("synthetic", folder / "data", options=options)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "request.json").write_text('{"user": 1, "candidates": {"item_id": [1, 2, 3]}}')
    for words in ((*TRAIN[:-1], "run"), ("export", "run", "--out", "artefact")):
        code, _, err = run(folder, words)
        assert code == 0, err


def run(folder: Path, words: tuple[str, ...]) -> tuple[object, str, str]:
    """Run a command in a folder, in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["gem", *words]
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as ending:
        return ending.code, out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("main returned")


@dataclass
class Forked:
    """A command in a process of its own, from the fork server, which has torch loaded already.

    Args:
        folder: where it runs.
        words: of the command.
        env: added to the environment, as a launcher would.
        obeys_permissions: without root's right to ignore them.
    """

    folder: Path
    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    obeys_permissions: bool = False

    def start(self) -> "Forked":
        self._output = Path(tempfile.mkdtemp(dir=self.folder.parent))
        settings = (str(self.folder), self.words, self.env, self.obeys_permissions)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_child, args=(*settings, str(self._output)))
        self.process.start()
        return self

    def outcome(self) -> tuple[object, str, str]:
        """Exit code, stdout, stderr."""
        self.process.join(60)
        assert self.process.exitcode is not None, "it does not end"
        out, err = ((self._output / name).read_text() for name in ("out", "err"))
        return self.process.exitcode, out, err


def _child(
    folder: str, words: tuple[str, ...], env: dict[str, str], obeys_permissions: bool, output: str
) -> None:
    os.chdir(folder)
    os.environ.update(env, OMP_NUM_THREADS="1")
    if obeys_permissions:
        _obey_permissions()
    for number, name in ((1, "out"), (2, "err")):
        with Path(output, name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["gem", *words]
    main()


def _obey_permissions() -> None:
    """Give up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH; others never had them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high ones
    assert libc.capget(header, sets) == 0
    sets[0] &= ~0b110
    assert libc.capset(header, sets) == 0


def outcome(case: Case, world: Path, folder: Path) -> tuple[object, str, str]:
    """Make a copy of the world, bring the fault about, run the command."""
    shutil.copytree(world, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        case.make()
    return run(folder, case.words)


def block(case: Case, line: str) -> str:
    """What the page shows of a case."""
    # Checksums and fingerprints depend on the machine, to the last bit of a weight.
    line = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,12}\b", "…", line)
    # The CSV reader tells the row only where it reads with one thread.
    line = re.sub(r"(CSV column #\d+: )Row #\d+: ", r"\1", line)
    title = f"{case.name[0].upper()}{case.name[1:]}"
    return f"### {title}\n\n```text\n$ gem {shlex.join(case.words)}\n{line}\n```\n"


HEAD = """# Bad input

What `gem` prints where something is wrong with what it was given: one line on stderr that says
where, what is expected, what came and what to do, and exit code 2. Nothing that was there before is
changed. `gem --debug COMMAND ...` shows the traceback above the line. The blocks below are written
by `python packages/gem/tests/bad_inputs.py`, from the table that the tests run; a test holds them
equal to what is printed.

Not among them, because these are normal: a stream without events, a user without a history, a
missing value (it has a declared fill), an unknown label (it has a mask), a Parquet file without
rows.

Faults that a table cannot show:

- **Ctrl-C or SIGTERM** during training and its evaluations ends after the step, with a checkpoint,
  and prints the command that goes on from there: exit code 130, and 0 after SIGTERM, as a scheduler
  wants it. A second one ends at once. Before the first step and in every other command Ctrl-C ends
  at once with `interrupted`. SIGTERM ends `gem eval` and `gem predict` with `terminated; nothing
  was written` (143). What was being written never counts, and the next try removes it. `gem bench
  ablation` and `gem scaling` end as the run does that they train, end the processes that they have
  started, keep what has ended, and go on when they are called again.
- **A full disk** while a checkpoint is written ends the run with `checkpoint: run/checkpoints must
  take another checkpoint; got [Errno 28] No space left on device: ...; free space there, then
  continue with --resume`. The checkpoint before it is whole; the torn one is removed. With
  `train.checkpoint_failure = "go_on"` the run warns and tries again at the next one.
- **A kill** while a checkpoint is written leaves a folder `partial-step-N`, which never counts and
  which the next checkpoint removes.
- **A damaged checkpoint**, with files gone, cut short or one bit changed, is passed over by
  `--resume` in a line that says so, and kept as `damaged-step-N`; the one before it is taken, and
  the steps since are trained again, with the same result. Where none is whole `--resume` refuses,
  as to begin anew would overwrite the log.
- **A loss or a gradient that is NaN or infinite** ends the run before the weights move, with a
  checkpoint: `gem train: loss must be finite; got nan in step 5; its batch (rows 128 to 159 of the
  log) is in run/faulty-batches/step-5-rank-0.pt; lower train.dense.lr or ...`. With
  `train.guard.nonfinite = "skip"` the step is left out and counted.
- **Under torchrun** rank 0 tells what every rank finds; the line of another rank begins with
  `rank N:`. The launcher then prints a report of its own, which repeats the line at its end.
- **Too little memory** is told as such; the fix is a smaller batch, table or model.
"""


def write_page() -> None:
    """Write docs/bad-input.md from what the cases print."""
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as root:
        world = Path(root) / "world"
        make_world(world)
        group = ""
        for place, case in enumerate(CASES):
            if case.group != group:
                group = case.group
                parts.append(f"## {group}\n")
            _, _, err = outcome(case, world, Path(root) / str(place))
            parts.append(block(case, err.strip()))
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_page()
