"""Small batches of tables, and what operators on them must give, bag by bag and row by row."""

import torch

from gem_embeddings.ops import TableLayout

# Two features share each table; the widths differ and one is no power of two.
SHAPES = [(7, 4), (9, 6)]
FEATURES = [(0, "sum"), (1, "none"), (1, "mean"), (0, "sum")]


def batch_of(lengths, *, shapes=SHAPES, features=FEATURES, dtype=torch.float32, seed=0, hot=False):
    """Weights, ids, bags, weights of ids, layout and counts; every feature has these lengths."""
    draw = torch.Generator().manual_seed(seed)
    layout = TableLayout.packed(shapes, features)
    every = torch.tensor(list(lengths) * len(features), dtype=torch.int64)
    bags = torch.cat([torch.zeros(1, dtype=torch.int64), every.cumsum(0)])
    counts = [sum(lengths)] * len(features)
    # One id before and one behind the rows is read as zeros.
    ids = [
        torch.randint(-1, shapes[table][0] + 1, (count,), generator=draw)
        for (table, _), count in zip(features, counts, strict=True)
    ]
    ids = torch.cat(ids)
    if hot:
        ids = torch.where(torch.rand(ids.shape, generator=draw) < 0.5, 1, ids)
    weights = torch.randn(layout.elements, generator=draw).to(dtype)
    id_weights = torch.randn(ids.shape[0], generator=draw).to(dtype)
    return weights, ids, bags, id_weights, layout, counts


def spoilt(values, changes):
    """Return other values at some places."""
    values = values.clone()
    for place, value in changes.items():
        values[place] = value
    return values


def oracle(weights, ids, bags, id_weights, layout, counts):
    """Look up one bag after the other, in plain torch that autograd can follow."""
    outputs, ends = [], bags.tolist()
    batch = (len(ends) - 1) // max(1, len(counts))
    for index, feature in enumerate(layout.features):
        table = layout.tables[feature.table]
        rows = weights[table.offset : table.offset + table.rows * table.width]
        rows = rows.view(table.rows, table.width)

        def vector(i, rows=rows, table=table):
            row = int(ids[i])
            if not 0 <= row < table.rows:
                return rows[0] * 0 + id_weights[i] * 0
            return rows[row] * id_weights[i]

        vectors = []
        for b in range(index * batch, (index + 1) * batch):
            bag = [vector(i) for i in range(ends[b], ends[b + 1])]
            if feature.pooling == "none":
                vectors += bag
                continue
            total = sum(bag, rows[0] * 0)
            vectors.append(total / max(1, len(bag)) if feature.pooling == "mean" else total)
        nothing = (weights.sum() + id_weights.sum()) * 0
        width = table.width
        stacked = torch.stack(vectors) if vectors else weights.new_empty((0, width))
        outputs.append(stacked + nothing)
    return outputs


def row_gradients(grad, ids, bags, id_weights, layout, counts):
    """Sum the gradients of each row of each table in fp64: number over all tables -> gradient."""
    sums, ends, begin = {}, bags.tolist(), 0
    batch = (len(ends) - 1) // max(1, len(counts))
    for index, feature in enumerate(layout.features):
        table = layout.tables[feature.table]
        vector = 0
        for b in range(index * batch, (index + 1) * batch):
            for i in range(ends[b], ends[b + 1]):
                share = 1 / (ends[b + 1] - ends[b]) if feature.pooling == "mean" else 1.0
                at = (
                    begin
                    + (vector if feature.pooling == "none" else b - index * batch) * table.width
                )
                row = int(ids[i])
                if 0 <= row < table.rows:
                    part = grad[at : at + table.width].double() * share * float(id_weights[i])
                    key = table.row_offset + row
                    sums[key] = sums.get(key, 0) + part
                vector += 1
        begin += (vector if feature.pooling == "none" else batch) * table.width
    return sums
