"""How batches are cut: within the limit, every row once, results where their rows are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from torch_dcp_backport import engine
from torch_dcp_backport.engine._src import batches

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=12)


@given(SPANS, st.integers(0, 20), st.integers(0, 8))
def test_every_row_is_in_one_part_and_no_part_is_too_large(lengths: Any, slack: int, more: int) -> None:
    spans = [(start, start + length) for start, length in lengths]
    most = max((length for _, length in lengths), default=1) + slack
    parts = batches.by_tokens(spans, most)
    for spread in (parts, batches.spread(parts, len(parts) + more)):
        assert sorted(row for part in spread for row in part) == list(range(len(spans)))
        for part in filter(None, spread):
            columns = max(spans[row][1] for row in part) - min(spans[row][0] for row in part)
            assert len(part) * columns <= most
    assert len(batches.spread(parts, len(parts) + more)) == len(parts) + more


@pytest.mark.parametrize("limit", [batches.Limit(rows=2), batches.Limit(tokens=24)], ids=str)
@pytest.mark.parametrize("kind", ["padded", "jagged"])
def test_results_are_where_their_rows_are(kind: str, limit: batches.Limit) -> None:
    data: Any = small.batch(0)
    width = small.LENGTH
    if kind == "jagged":
        data = small.jagged(data)
    plan = batches.plan_alone(data, limit)
    outputs = []
    for micro in batches.micro_batches(data, plan):
        inputs = batches.model_inputs(micro.data, torch.device("cpu"))
        assert inputs["input_ids"].shape[1] <= width
        there = inputs["attention_mask"].bool()
        assert there[:, 0].any()
        assert there[:, -1].any()
        tripled = (inputs["input_ids"] * 3 + 1) * there
        outputs.append({"tripled": batches.like_rows(tripled, micro.data), "row": torch.tensor(micro.rows)})
    found = batches.restored(outputs, plan)
    assert found["row"].tolist() == list(range(small.ROWS))
    if kind == "jagged":
        assert torch.equal(found["tripled"].values(), data["input_ids"].values() * 3 + 1)
    else:
        assert torch.equal(found["tripled"], (data["input_ids"] * 3 + 1) * data["attention_mask"])


def test_values_that_have_rows_go_with_them() -> None:
    data = {**small.batch(0), "name": list("abcdefghi"), "response": torch.arange(18).view(9, 2), "rate": 0.5}
    data["step"] = torch.tensor(3)
    plan = batches.plan_alone(data, batches.Limit(rows=4))
    *_, last = batches.micro_batches(data, plan)
    assert (last.data["name"], last.data["rate"], last.data["step"].item()) == (["i"], 0.5, 3)
    assert last.data["response"].tolist() == [[16, 17]]


NAMES = list("abcdefghi")


@pytest.mark.parametrize("limit", [batches.Limit(rows=2), batches.Limit(tokens=24)], ids=str)
@pytest.mark.parametrize("kind", ["padded", "jagged"])
def test_arrays_go_with_their_rows(kind: str, limit: batches.Limit) -> None:
    """As a DataProto of verl has them: of objects, of numbers, of a value for each column; also in a dict."""
    data: Any = small.batch(0)
    wide = data["input_ids"].numpy()
    if kind == "jagged":
        data = small.jagged(data)
    arrays = {"uid": np.array(NAMES, dtype=object), "score": np.arange(9.0), "wide": wide}
    data.update(
        arrays, extra={"deep": {"uid": arrays["uid"]}, "betas": [0] * 9}, scale=np.float64(3), two=np.ones(2)
    )
    plan = batches.plan_alone(data, limit)
    seen = []
    for micro in batches.micro_batches(data, plan):
        picked = [NAMES[row] for row in micro.rows]
        assert micro.data["uid"].tolist() == micro.data["extra"]["deep"]["uid"].tolist() == picked
        assert micro.data["score"].tolist() == micro.rows
        assert (micro.data["scale"], micro.data["two"].tolist()) == (3, [1, 1])
        assert micro.data["extra"]["betas"] == [0] * 9
        expected = wide[micro.rows]
        columns = slice(*micro.columns) if kind == "padded" else slice(None)
        assert np.array_equal(micro.data["wide"], expected[:, columns])
        seen += picked
    assert sorted(seen) == NAMES


def named(api: Any, folder: Any) -> Any:
    made = small.made(folder)
    rows = small.own_rows(small.batch(0), made)
    rows["uid"] = np.array(
        [f"{dist.get_rank()}-{row}" for row in range(len(rows["input_ids"]))], dtype=object
    )
    seen = []

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        seen.append((len(data["input_ids"]), data["uid"].tolist()))
        return engine.sft_loss(model_output, data)

    made.train_batch(rows, loss)
    return seen


def test_a_loss_gets_the_arrays_of_its_rows(ranks, tmp_path) -> None:
    small.write(tmp_path / "m")
    for rank, seen in enumerate(ranks(named, tmp_path / "m")):
        names = [name for _, part in seen for name in part]
        assert [count for count, _ in seen] == [len(part) for _, part in seen]
        assert names == [f"{rank}-{row}" for row in range(len(names))]


def test_a_filler_has_no_rows_of_arrays() -> None:
    data = {**small.batch(0), "uid": np.array(NAMES, dtype=object)}
    plan = batches.plan_alone(data, batches.Limit(rows=9))
    *_, filler = batches.micro_batches(data, plan._replace(parts=[*plan.parts, []]))
    assert filler.data["uid"].tolist() == []
    assert filler.data["input_ids"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"multi_modal_inputs": [{}, {"pixel_values": torch.ones(1)}, *[{}] * 7]}, "images"),
        ({"force_group_size": 2}, "force_group_size=2"),
        ({"force_group_size": [2] * 9}, "force_group_size=2"),
    ],
)
def test_what_would_have_no_effect_is_refused(said: Any, says: str) -> None:
    nothing = {"multi_modal_inputs": [{}] * 9, "force_group_size": 1}
    for told in (nothing, {"multi_modal_inputs": None, "force_group_size": torch.ones(9)}):
        batches.plan_alone({**small.batch(0), **told}, batches.Limit(rows=2))
    with pytest.raises(ValueError, match=says):
        batches.plan_alone({**small.batch(0), **said}, batches.Limit(rows=2))


def planned(api: Any, faults: dict[int, str], limit: tuple[Any, Any] = (2, None), copies: int = 1) -> Any:
    rank = dist.get_rank()
    data: Any = small.share(small.batch(0), rank // copies, 4 // copies)
    fault = faults.get(rank, "")
    if fault == "no rows":
        data = {name: value[:0] for name, value in data.items()}
    if fault == "no tokens":
        data["loss_mask"] = data["loss_mask"] * 0
    if fault == "no ids":
        del data["input_ids"]
    if fault == "another id":
        data["input_ids"] = data["input_ids"] + 1
    if fault == "padding":
        data["attention_mask"] = data["attention_mask"] * 0
    if fault == "narrow":
        data["attention_mask"] = data["attention_mask"][:, 1:]
    if fault == "mask of one column":
        data["loss_mask"] = data["loss_mask"][:, :1]
    if fault == "a list":
        data["loss_mask"] = data["loss_mask"].tolist()
    if fault == "no number":
        data["loss_mask"] = data["loss_mask"] * float("nan")
    if fault == "other numbers":
        data["attention_mask"] = data["attention_mask"] * 3
    if fault == "fractions":
        data["input_ids"] = data["input_ids"].float()
    if fault in ("two temperatures", "a cold one"):
        data["temperature"] = torch.ones(2) if fault == "two temperatures" else -1.0
    if fault in ("other rows", "no length", "narrowed", "fewer jagged rows", "jagged padding", "jagged"):
        data = small.jagged(small.batch(0))
    if fault == "other rows":
        rows = data["loss_mask"].unbind()[::-1]
        data["loss_mask"] = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    if fault == "fewer jagged rows":
        rows = data["loss_mask"].unbind()[1:]
        data["said"] = {"advantages": torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)}
    if fault == "jagged padding":
        data["attention_mask"] = data["input_ids"] * 0
    if fault in ("padded mask", "shorter mask", "mask of fewer rows", "mask of other numbers"):
        mask = small.batch(0)["attention_mask"]
        data = {**small.jagged(small.batch(0)), "attention_mask": mask}
        if fault == "shorter mask":
            mask[1, mask[1].nonzero()[0]] = 0
        if fault == "mask of fewer rows":
            data["attention_mask"] = mask[1:]
        if fault == "mask of other numbers":
            data["attention_mask"] = mask * 2
    if fault == "no length":
        rows = [torch.zeros(2, dtype=torch.long), torch.zeros(0, dtype=torch.long)]
        data["input_ids"] = data["loss_mask"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if fault == "narrowed":
        places = torch.tensor([0, 1]), torch.tensor([2, 3])
        data["input_ids"] = torch.nested.narrow(torch.zeros(2, 6).long(), 1, *places, layout=torch.jagged)
    if fault == "a tensor":
        data = data["input_ids"]
    try:
        plan = batches.plan(data, batches.Limit(*limit), copies=copies)
    except RuntimeError as error:
        return str(error)
    return [len(part) for part in plan.parts], plan.tokens


def test_every_rank_has_as_many_micro_batches(ranks) -> None:
    tokens = int(small.batch(0)["loss_mask"].sum())
    found = ranks(planned, {})
    assert [count for count, _ in found] == [[2, 2, 2], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert {number for _, number in found} == {tokens}
    # As verl's batches are after left_right_2_no_padding.
    masked = ranks(planned, dict.fromkeys(range(4), "padded mask"))
    assert masked == ranks(planned, dict.fromkeys(range(4), "jagged"))
    without = ranks(planned, {0: "no rows", 2: "no tokens"})
    assert [count for count, _ in without] == [[0], [1], [1], [1]]
    assert len({number for _, number in without}) == 1


@pytest.mark.parametrize(
    ("faults", "limit", "says"),
    [
        ({0: "no ids"}, (2, None), r"rank 0: .*no input_ids; it has attention_mask, loss_mask"),
        ({2: "a tensor"}, (2, None), r"rank 2: .*the batch is a Tensor: expected a mapping with input_ids"),
        ({3: "padding"}, (2, None), r"rank 3: row 0 is padding alone"),
        ({1: "narrow"}, (2, None), r"rank 1: attention_mask of shape \(1, 10\).*\(1, 11\)"),
        ({1: "mask of one column"}, (2, None), r"rank 1: loss_mask is of shape \(1, 1\)"),
        ({2: "a list"}, (2, None), r"rank 2: loss_mask is a list: expected a tensor"),
        ({1: "fewer jagged rows"}, (2, None), r"rank 1: said.advantages has 8 rows, input_ids has 9"),
        ({1: "no number"}, (2, None), r"rank 1: the sum of loss_mask is nan: expected finite numbers"),
        ({3: "other numbers"}, (2, None), r"rank 3: attention_mask has \[3\]: expected 0 for padding"),
        ({3: "jagged padding"}, (2, None), r"rank 3: attention_mask is jagged and not 1 everywhere"),
        (
            {1: "shorter mask"},
            (2, None),
            r"rank 1: row 1 has \d+ tokens in attention_mask, and \d+ in input_",
        ),
        (
            {1: "mask of fewer rows"},
            (2, None),
            r"rank 1: attention_mask of shape \(8, 11\).* of the 9 jagged",
        ),
        (
            {2: "mask of other numbers"},
            (2, None),
            r"rank 2: attention_mask has \[2\]: expected 0 for padding",
        ),
        ({0: "fractions"}, (2, None), r"rank 0: input_ids is torch.float32: expected whole numbers"),
        ({1: "two temperatures"}, (2, None), r"rank 1: temperature has the shape \(2,\): .* of 1 rows"),
        ({1: "a cold one"}, (2, None), r"rank 1: temperature=-1.0: expected a number at least 0"),
        ({0: "other rows"}, (2, None), r"rank 0: loss_mask has rows of .* tokens, input_ids of"),
        ({0: "no length"}, (2, None), r"rank 0: row 1 has no tokens"),
        ({3: "narrowed"}, (2, None), r"rank 3: input_ids is a part of another tensor's rows"),
        (dict.fromkeys(range(4), "no tokens"), (2, None), r"no token on any rank has a loss"),
        (dict.fromkeys(range(4), "no rows"), (2, None), r"no rows on any rank"),
        ({}, (None, 6), r"tokens, more than the 6 of a micro-batch"),
        ({}, (None, None), r"expected a positive number"),
        ({}, (0, None), r"expected a positive number"),
        ({}, (2, 24), r"expected a positive number"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_one_error_on_every_rank(ranks, faults: Any, limit: Any, says: str) -> None:
    texts = ranks(planned, faults, limit)
    assert all(isinstance(text, str) and re.search(says, text) for text in texts), texts
    assert len(set(texts)) == 1


def test_ranks_that_compute_a_layer_together_have_the_same_rows(ranks) -> None:
    tokens = int(small.batch(0)["loss_mask"].sum())
    assert ranks(planned, {}, copies=2) == [([2, 2, 2, 2], tokens)] * 2 + [([1, 0, 0, 0], tokens)] * 2
    texts = ranks(planned, {3: "another id"}, copies=2)
    assert len(set(texts)) == 1
    assert "rank 3: other rows (input_ids) than rank 2" in texts[0]


def test_a_mask_may_be_that_of_responses() -> None:
    """As verl's policies have it: ids are jagged, and the mask of the loss is of the responses alone."""
    data = small.jagged(small.batch(0))
    mask = torch.ones(small.ROWS, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="loss_mask is of shape"):
        batches.plan_alone({**data, "loss_mask": mask}, batches.Limit(rows=2))
    with pytest.raises(ValueError, match="loss_mask is of shape"):
        batches.plan_alone({**data, "loss_mask": mask, "response_mask": 1 - mask}, batches.Limit(rows=2))
    found = batches.plan_alone({**data, "loss_mask": mask, "response_mask": mask}, batches.Limit(rows=2))
    assert found.tokens == mask.sum()


def test_masks_may_be_weights() -> None:
    data: Any = {name: value[:2] for name, value in small.batch(0).items()}
    for value, count in ((0.25, 0.25 * 2 * small.LENGTH), (1.0, 2 * small.LENGTH)):
        data["loss_mask"] = torch.full((2, small.LENGTH), value, dtype=torch.bfloat16)
        assert batches.plan_alone(data, batches.Limit(rows=2)).tokens == count
