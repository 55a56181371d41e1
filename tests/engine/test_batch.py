"""`BatchBuilder` keeps what it knows of block tables between steps; every batch is as a fresh start would give it."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="batches are tensors")

from engine import batch as batch_module  # noqa: E402
from engine.batch import BatchBuilder, Row, TableSlots, build_batch, common_blocks  # noqa: E402

CPU = torch.device("cpu")


class Tables:
    """Requests whose block tables grow, fork, are re-pointed, shrink and go, as schedulers and caches make them."""

    def __init__(self, seed, block_size):
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.tables = {}
        self.num_computed = {}
        self.next_key = 0

    def block(self):
        # Few ids, some neighbours: tables of different requests meet by chance, and runs form and break.
        return self.rng.randrange(40)

    def change(self):
        kind = self.rng.choice(
            ["new", "new", "fork", "grow", "grow", "grow", "grow", "re-point", "shrink", "gone", "reuse"]
        )
        if kind == "new" or not self.tables:
            self.add([self.block() for _ in range(self.rng.randint(1, 6))], 0)
            return
        key = self.rng.choice(list(self.tables))
        table = self.tables[key]
        if kind == "fork":
            self.add(list(table), self.num_computed[key])
        elif kind == "grow":
            table.append(table[-1] + 1 if self.rng.random() < 0.6 else self.block())
        elif kind == "re-point":
            table[self.rng.randrange(len(table))] = self.block()
        elif kind == "shrink":
            del table[self.rng.randint(1, len(table)) :]
            self.num_computed[key] = 0
        elif kind == "gone":
            del self.tables[key]
        else:  # a request that is over, and another of the same name
            self.tables[key] = [self.block() for _ in range(self.rng.randint(1, 6))]
            self.num_computed[key] = 0

    def add(self, table, num_computed):
        self.tables[self.next_key] = table
        self.num_computed[self.next_key] = num_computed
        self.next_key += 1

    def rows(self):
        rows = []
        for key, table in self.tables.items():
            room = len(table) * self.block_size
            if self.rng.random() < 0.2:
                continue  # not in this step
            start = min(self.num_computed[key], room - 1)
            end = self.rng.choice([start + 1, self.rng.randint(start + 1, room)])
            self.num_computed[key] = end
            block_ids = self.rng.choice([tuple, list, lambda ids: array("I", ids)])(table)
            rows.append(Row([self.rng.randrange(99) for _ in range(end - start)], start, block_ids, key=key))
        return rows


def seen(batch):
    """All that a batch says, as numbers."""

    def tree(node):
        return node.first_row, node.last_row, node.start, node.end, [tree(child) for child in node.children]

    metadata = batch.metadata
    return {
        "input_ids": batch.input_ids.tolist(),
        "position_ids": batch.position_ids.tolist(),
        "logits_indices": batch.logits_indices.tolist(),
        "slot_mapping": metadata.slot_mapping.tolist(),
        "min_num_blocks": metadata.min_num_blocks,
        "rows": [
            (row.query_start, row.query_end, row.start, str(row.slots), row.table.tensor(0, row.context_len).tolist())
            for row in metadata.rows
        ],
        "nodes": [tree(node) for node in metadata.nodes],
    }  # fmt: skip


@pytest.mark.parametrize("attention", ["gather", "tree"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), block_size=st.sampled_from([1, 2, 4, 16]))
def test_a_builder_gives_what_a_fresh_start_gives(attention, seed, block_size):
    """Whatever happened to the tables in between: growth, re-pointed duplicates, forks, preemption, requests gone."""
    tables = Tables(seed, block_size)
    builder = BatchBuilder(block_size, attention=attention)
    for _ in range(12):
        for _ in range(tables.rng.randrange(4)):
            tables.change()
        rows = tables.rows()
        if rows:
            built = seen(builder.build(rows))
            assert built == seen(build_batch(rows, block_size, attention=attention))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), block_size=st.sampled_from([1, 2, 4, 16]))
def test_nodes_are_what_tables_share(seed, block_size):
    """By brute force: in a batch, any two rows are below nodes that reach exactly as far as their common blocks."""
    tables = Tables(seed, block_size)
    for _ in range(12):
        tables.change()
    rows = tables.rows()
    if not rows:
        return
    metadata = build_batch(rows, block_size, attention="tree").metadata
    whole = [[*row.table.known][: 4 * (row.start // block_size)] for row in metadata.rows]
    reach = [[0] * len(rows) for _ in rows]
    waiting = list(metadata.nodes)
    while waiting:
        node = waiting.pop()
        for first in range(node.first_row, node.last_row):
            for second in range(node.first_row, node.last_row):
                reach[first][second] = max(reach[first][second], node.end)
        assert all(child.start == node.end for child in node.children)
        waiting += node.children
    for first, one in enumerate(whole):
        for second, other in enumerate(whole):
            if first != second:
                common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
                common = min(len(one), len(other)) if common is None else common
                assert reach[first][second] == common // 4 * block_size


def test_the_order_of_rows_that_share_nothing_stays():
    """Then a batch is laid out as it was given, and nothing is to be looked up."""
    rows = [Row([number], 2, [number, 50 + number, 99 - number]) for number in (5, 3, 8, 1)]
    assert build_batch(rows, 1, attention="tree").input_ids.tolist() == [[5, 3, 8, 1]]


def test_tables_that_only_grow_are_not_grouped_again(monkeypatch):
    """A decode step's cost must not be that of sorting all tables."""
    calls = []
    grow = batch_module._grow_forest
    monkeypatch.setattr(batch_module, "_grow_forest", lambda *arguments: calls.append(1) or grow(*arguments))
    builder = BatchBuilder(2, attention="tree")
    tables = {"a": [1, 2, 3], "b": [1, 2, 7]}

    def step(start):
        return builder.build([Row([0], start, tuple(table), key=key) for key, table in tables.items()])

    step(6 - 1)
    for start in range(6, 20):
        tables["a"].append(30 + start)
        tables["b"].append(60 + start)
        step(start)
    before = len(calls)
    assert before <= 3, "until the rows have whole blocks behind what they share"
    tables["b"][1] = 2 + 40  # re-pointed: the rows share one block less
    assert step(20).metadata.nodes[0].end == 2
    assert len(calls) == before + 1


def test_requests_that_left_are_forgotten():
    """A builder lives as long as its engine; what it keeps must not grow with the requests served."""
    builder = BatchBuilder(4)
    for number in range(10):
        builder.build([Row([1], 0, [number], key=number), Row([1], 0, [99])])
        assert list(builder._tables) == [number]


def test_a_failed_build_changes_nothing():
    """The engine may drop the request that was wrong and go on with the others."""
    builder = BatchBuilder(4, attention="tree")
    good = [Row([1], 4, [3, 4], key="a"), Row([1], 4, [3, 5], key="b")]
    wanted = seen(builder.build(good))
    for wrong in (Row([], 4, [3, 4], key="c"), Row([1], 4, [3], key="c"), Row([1], 4, [3, 4], key="a")):
        with pytest.raises(ValueError, match=r"no tokens|need 2|comes twice"):
            builder.build([*good, wrong])
        assert seen(builder.build(good)) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size=0: a positive"),
        ({"block_size": 4, "attention": "flash"}, "attention='flash': one of 'auto'"),
    ],
)
def test_a_builder_refuses_what_it_cannot_do(arguments, message):
    """A misspelt option must not silently mean the default."""
    with pytest.raises(ValueError, match=message):
        BatchBuilder(**arguments)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_common_blocks_counts_equal_leading_ids(first, second):
    """Found by halving bytes, so every length and every place of the difference counts."""
    packed = [array("I", [256**number for number in ids]).tobytes() for ids in (first, second)]
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    assert common_blocks(*packed) == count


def test_slots_that_were_made_are_kept():
    """A step pays for the blocks that are new, not for the whole context again."""
    table = TableSlots(2, CPU)
    table.update(array("I", [5, 1]))
    assert table.slots(0, 4).tolist() == [10, 11, 2, 3]
    room = table._slots
    table._slots[0] = 77  # what is known is not made again
    table.update(array("I", [5, 1, 8]))
    assert table.slots(0, 6).tolist() == [77, 11, 2, 3, 16, 17]
    assert table._slots is room, "room is made for twice as many"
    table.update(array("I", [6, 1, 8]))
    assert table.slots(0, 6).tolist() == [12, 13, 2, 3, 16, 17]
    assert table.slots(2, 4) == slice(2, 4)
