"""Flat buffers: the layout, and pack and unpack against their eager references."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_zero import _extensions
from moe_zero.ops import flat as flat_ops
from moe_zero.ops.flat import (
    FlatPlan,
    TensorList,
    pack,
    pack_reference,
    sum_rows,
    sum_rows_reference,
    unpack,
    unpack_reference,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def same(a, b):
    """Equal bit for bit, where a NaN equals any NaN: its payload is not defined by a conversion."""
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool((nan | (a.view(BITS[a.dtype]) == b.view(BITS[b.dtype]))).all())


def special_values(dtype):
    """Values at which conversions go wrong: signed zeros, denormals, ties, overflow, inf, NaN."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, info.tiny, -info.tiny, info.smallest_normal / 4, info.max, info.min]
    values += [float("inf"), float("-inf"), float("nan"), 65504.0, 65519.99, 65520.0, 65536.0, 2.0**-24, 2.0**-25]
    values += [1.5 * 2.0**-25, 2.0**-14, 2.0**-14 - 2.0**-25, 3.38953139e38, 3.4e38, 2.0**-133, 2.0**-149]
    values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e-310]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


# --- layout ----------------------------------------------------------------------------------------------------------

layouts = st.integers(0, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 200), min_size=n, max_size=n),
        st.lists(st.sampled_from(DTYPES), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.integers(1, 17),
        st.lists(st.integers(-1, 1), min_size=n, max_size=n),
    )
)


@given(layouts)
def test_groups_split_evenly_and_trainable_ones_come_first(layout):
    plan = FlatPlan(*layout)
    sizes, dtypes, trainable, world_size, tags = layout
    keys = [(not g.trainable, g.tag, DTYPES.index(g.dtype)) for g in plan.groups]
    assert keys == sorted(set(keys))
    assert sorted(i for g in plan.groups for i in g.members) == list(range(len(sizes)))
    byte = element = 0
    for group in plan.groups:
        assert all(
            (trainable[i], tags[i], dtypes[i]) == (group.trainable, group.tag, group.dtype) for i in group.members
        )
        assert list(group.members) == sorted(group.members)
        numel = sum(sizes[i] for i in group.members)
        assert group.shard_numel % 16 == 0
        assert 0 <= group.shard_numel * world_size - numel < 16 * world_size
        assert (group.byte_offset, group.element_offset) == (byte, element)
        byte += group.shard_numel * group.dtype.itemsize
        element += group.shard_numel
    assert plan.shard_bytes == byte
    assert plan.trainable_bytes == sum(g.shard_numel * g.dtype.itemsize for g in plan.groups if g.trainable)
    for flag in (True, False):
        assert plan.shard_numel(flag) == sum(g.shard_numel for g in plan.groups if g.trainable == flag)


@given(layouts)
def test_pieces_cover_every_element_once_and_never_overlap(layout):
    plan = FlatPlan(*layout)
    covered = [torch.zeros(size, dtype=torch.int32) for size in plan.sizes]
    used = torch.zeros(plan.world_size, plan.shard_bytes, dtype=torch.int32)
    for tensor, start, rank, byte, count in plan.pieces:
        covered[tensor][start : start + count] += 1
        used[rank, byte : byte + count * plan.dtypes[tensor].itemsize] += 1
    assert all((c == 1).all() for c in covered)
    assert used.numel() == 0 or used.max() <= 1


@given(layouts, st.sampled_from(DTYPES))
def test_cast_keeps_the_partition_in_elements(layout, dtype):
    plan = FlatPlan(*layout)
    cast = plan.cast(dtype)
    assert [(g.members, g.shard_numel, g.element_offset) for g in cast.groups] == [
        (g.members, g.shard_numel, g.element_offset) for g in plan.groups
    ]
    assert [(p.tensor, p.tensor_start, p.rank, p.count) for p in cast.pieces] == [
        (p.tensor, p.tensor_start, p.rank, p.count) for p in plan.pieces
    ]
    trainable = plan.cast(dtype, trainable_only=True)
    assert trainable.shard_bytes == plan.shard_numel(True) * dtype.itemsize
    assert trainable.sizes == tuple(s for s, t in zip(plan.sizes, plan.trainable, strict=True) if t)


@given(layouts, st.sampled_from(DTYPES))
@settings(max_examples=25)
def test_plan_is_a_value(layout, dtype):
    for plan in (FlatPlan(*layout), FlatPlan(*layout).cast(dtype)):
        for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
            assert other == plan
            assert hash(other) == hash(plan)
            assert other.pieces == plan.pieces
        assert plan != FlatPlan([1], ["float32"], [True], 19)
    with pytest.raises(AttributeError, match="immutable"):
        plan.world_size = 3


def test_repr_says_what_lies_where():
    text = repr(FlatPlan([24_000_000, 768], ["float32", torch.bfloat16], [True, False], 4))
    assert text == (
        "FlatPlan(2 tensors, 24,000,768 elements over 4 ranks, 24,000,384 bytes per rank; "
        "trainable float32: 1 tensors, 6,000,000 per rank, frozen bfloat16: 1 tensors, 192 per rank)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1], ["float32"], [True], 2), r"sizes\[0\] is -1"),
        (([1], ["float32", "float32"], [True], 2), "dtypes has 2 entries, but sizes has 1"),
        (([1], ["float32"], [], 2), "trainable has 0 entries"),
        (([1], ["float32"], [True], 2, [0, 0]), "tags has 2 entries"),
        (([1], ["float32"], [True], 0), "world_size is 0"),
        (([1], ["int8"], [True], 2), r"dtypes\[0\] is int8"),
        (([1], [torch.int32], [True], 2), r"dtypes\[0\] is torch.int32"),
        (([2**60], ["float32"], [True], 2), "more than"),
    ],
)
def test_bad_layout_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        FlatPlan(*arguments)


# --- pack and unpack -------------------------------------------------------------------------------------------------


@st.composite
def strided_tensor(draw, dtype):
    """Up to four dimensions, any alignment, permuted, stepped."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    offset = draw(st.integers(0, 9))
    order = draw(st.permutations(range(len(shape))))
    whole = torch.randn([n * s for n, s in zip(shape, steps, strict=True)]).to(dtype)
    shifted = torch.empty(whole.numel() + offset, dtype=dtype)[offset:].view(whole.shape)
    shifted.copy_(whole)
    return shifted[tuple(slice(None, None, s) for s in steps)].permute(order)


@st.composite
def cases(draw):
    n = draw(st.integers(0, 6))
    flat_dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(n)]
    tensors = [draw(strided_tensor(draw(st.sampled_from(DTYPES)))) for _ in range(n)]
    plan = FlatPlan(
        [t.numel() for t in tensors],
        flat_dtypes,
        [draw(st.booleans()) for _ in range(n)],
        draw(st.integers(1, 17)),
        [draw(st.integers(0, 1)) for _ in range(n)],
    )
    return tensors, plan


@pytest.mark.parametrize("through", ["eager", "dispatcher", "tensor list"])
@given(cases(), st.sampled_from([1.0, 0.25, 1 / 3]), st.sampled_from([torch.float32, torch.float64]), st.data())
@settings(max_examples=60, deadline=None)
def test_pack_equals_reference(through, case, scale, stats_dtype, data):
    tensors, plan = case
    tensors = [None if data.draw(st.integers(0, 9)) == 0 else t for t in tensors]
    stats, expected_stats = torch.full((2,), 5, dtype=stats_dtype), torch.zeros(2, dtype=stats_dtype)
    expected = pack_reference(tensors, plan, scale=scale, stats=expected_stats)
    out = torch.full_like(expected, 77)
    with pytest.MonkeyPatch.context() as patch:
        if through == "dispatcher":
            patch.setattr(flat_ops, "_eager", lambda: False)
        tensors = TensorList(tensors) if through == "tensor list" else tensors
        assert pack(tensors, plan, out, scale=scale, stats=stats) is out
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(stats, expected_stats, rtol=1e-6, atol=0)


@pytest.mark.parametrize("through", ["eager", "dispatcher", "tensor list"])
@given(cases(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_unpack_equals_reference(through, case, accumulate):
    tensors, plan = case
    flat = pack_reference([torch.randn(t.shape, dtype=t.dtype) for t in tensors], plan)
    expected = [t.clone(memory_format=torch.preserve_format) for t in tensors]
    unpack_reference(flat, plan, expected, accumulate=accumulate)
    versions = [t._version for t in tensors]
    with pytest.MonkeyPatch.context() as patch:
        if through == "dispatcher":
            patch.setattr(flat_ops, "_eager", lambda: False)
        tensors = TensorList(tensors) if through == "tensor list" else tensors
        unpack(flat, plan, tensors, accumulate=accumulate)
    assert all(same(t, e) for t, e in zip(tensors, expected, strict=True))
    assert [t._version - v for t, v in zip(tensors, versions, strict=True)] == [1] * len(tensors)


@given(cases())
@settings(max_examples=30, deadline=None)
def test_round_trip_is_the_identity(case):
    tensors, plan = case
    plan = FlatPlan(plan.sizes, [t.dtype for t in tensors], plan.trainable, plan.world_size, plan.tags)
    targets = [torch.full_like(t, 9) for t in tensors]
    unpack(pack(tensors, plan), plan, targets)
    assert all(same(a, b) for a, b in zip(targets, tensors, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
def test_every_value_converts_as_in_eager(kernels, dtype, flat_dtype):
    values = torch.cat(
        [special_values(dtype), torch.randn(3000).to(dtype), torch.randn(3001).double().mul(1e-39).to(dtype)]
    )
    if dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    plan = FlatPlan([values.numel()], [flat_dtype], [True], 3)
    expected = pack_reference([values], plan)
    assert same(pack([values], plan), expected)
    for accumulate in (False, True):
        target, reference = torch.ones_like(values), torch.ones_like(values)
        unpack(expected, plan, [target], accumulate=accumulate)
        unpack_reference(expected, plan, [reference], accumulate=accumulate)
        assert same(target, reference)
    if dtype == flat_dtype:
        assert torch.equal(pack([values], plan).view(BITS[dtype])[: values.numel()], values.view(BITS[dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
def test_scale_and_sums_in_every_instruction_set(kernels, dtype, flat_dtype):
    tensors = [torch.randn(n).to(dtype)[n % 5 :] for n in (1, 33, 64, 1000, 70_001)]
    plan = FlatPlan([t.numel() for t in tensors], [flat_dtype] * 5, [True] * 5, 2)
    for scale in (1.0, 1 / 3):
        stats, expected_stats = torch.zeros(2).double(), torch.zeros(2).double()
        expected = pack_reference(tensors, plan, scale=scale, stats=expected_stats)
        assert same(pack(tensors, plan, scale=scale), expected)
        assert same(pack(tensors, plan, scale=scale, stats=stats), expected)
        torch.testing.assert_close(stats, expected_stats, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 31, 32, 500, 999])
def test_non_finite_value_raises_the_flag(kernels, value, dtype, position):
    tensor = torch.full((1000,), 1e3, dtype=dtype)
    plan = FlatPlan([1000], [dtype], [True], 1)
    stats = torch.zeros(2)
    pack([tensor], plan, stats=stats)
    assert stats[1] == 0
    tensor[position] = value
    pack([tensor], plan, stats=stats)
    assert stats[1] == 1


def test_overflow_in_the_conversion_raises_the_flag(kernels):
    plan = FlatPlan([64], ["float16"], [True], 1)
    stats = torch.zeros(2)
    pack([torch.full((64,), 1e5)], plan, stats=stats)
    assert stats[1] == 1
    pack([torch.full((64,), 8e4)], plan, stats=stats, scale=0.5)
    assert stats.tolist() == [64 * 4e4**2, 0]


def test_squares_beyond_float32_do_not_overflow(kernels):
    stats = torch.zeros(2, dtype=torch.float64)
    pack([torch.full((40,), 1e30)], FlatPlan([40], ["float32"], [True], 1), stats=stats)
    torch.testing.assert_close(stats, torch.tensor([4e61, 0], dtype=torch.float64))


def test_sums_do_not_depend_on_the_thread_count():
    tensors = [torch.randn(300_001), torch.randn(77), torch.randn(200_000)]
    plan = FlatPlan([t.numel() for t in tensors], ["float32"] * 3, [True] * 3, 2)
    sums, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        sums.append(torch.zeros(2, dtype=torch.float64))
        pack(tensors, plan, stats=sums[-1])
    torch.set_num_threads(threads)
    assert torch.equal(*sums)


def test_large_buffer_takes_the_streaming_path(kernels):
    tensors = [torch.randn(5_000_003), torch.randn(5), torch.randn(3_600_001)]
    plan = FlatPlan([t.numel() for t in tensors], ["float32"] * 3, [True] * 3, 2)
    assert plan.flat_bytes > 32 << 20
    flat = pack(tensors, plan)
    assert torch.equal(flat[: sum(plan.sizes)], torch.cat(tensors))
    targets = [torch.empty_like(t) for t in tensors]
    unpack(flat, plan, targets)
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))
    half = plan.cast("bfloat16")
    assert torch.equal(
        pack([t * 2 for t in tensors], half, scale=0.5)[: sum(plan.sizes)], torch.cat(tensors).bfloat16()
    )


@pytest.mark.parametrize("world_size", [1, 5])
def test_nothing_to_copy(world_size):
    empty = FlatPlan([], [], [], world_size)
    assert pack([], empty).numel() == 0
    unpack(torch.empty(0, dtype=torch.uint8), empty, [])
    zero_sized = FlatPlan([0, 0], ["float32", "float32"], [True, False], world_size)
    stats = torch.ones(2)
    assert pack([torch.empty(0), torch.empty(3, 0)], zero_sized, stats=stats).numel() == 0
    assert stats.tolist() == [0, 0]


def test_more_ranks_than_elements():
    plan = FlatPlan([3], ["float32"], [True], 8)
    flat = pack([torch.tensor([1.0, 2.0, 3.0])], plan).view(8, 16)
    assert flat[0, :3].tolist() == [1, 2, 3]
    assert flat.count_nonzero() == 3


# --- bad input: an error, and nothing written ------------------------------------------------------------------------


@pytest.fixture
def pair():
    return [torch.ones(6), torch.ones(2, 5)], FlatPlan([6, 10], ["float32"] * 2, [True] * 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], "tensors has 1 entries, but the plan was made for 2"),
        (lambda t: [t[0], torch.ones(11)], r"tensors\[1\] has 11 elements, but the plan was made for 10"),
        (lambda t: [t[0], t[1].int()], r"tensors\[1\] has dtype torch.int32"),
        (lambda t: [t[0], torch.ones(10, device="meta")], r"tensors\[1\] is on meta, but out is on cpu"),
    ],
)
@pytest.mark.parametrize("pack_function", [pack, pack_reference])
def test_pack_refuses_tensors_that_do_not_fit(pair, change, message, pack_function):
    tensors, plan = pair
    out = torch.full((plan.flat_bytes,), 7, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        pack_function(change(tensors), plan, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(31), "out has 124 bytes, but the plan needs 128"),
        (torch.zeros(32, dtype=torch.int32), "out has dtype torch.int32, but the plan needs uint8 or torch.float32"),
        (torch.zeros(64)[::2], "out is not contiguous"),
    ],
)
@pytest.mark.parametrize("pack_function", [pack, pack_reference])
def test_flat_buffer_that_does_not_fit_is_refused(pair, out, message, pack_function):
    tensors, plan = pair
    with pytest.raises(ValueError, match=message):
        pack_function(tensors, plan, out)


def test_a_tensor_list_sees_its_tensors_as_they_are_at_each_call(pair):
    tensors, plan = pair
    held = TensorList(tensors)
    assert held._held is not None
    assert copy.deepcopy(held)[1].equal(tensors[1])
    assert pickle.loads(pickle.dumps(held))[1].equal(tensors[1])
    tensors[0].data = torch.arange(6, dtype=torch.float64)  # another memory and dtype
    assert pack(held, plan)[:6].tolist() == list(range(6))
    storage = tensors[1].untyped_storage()
    storage.resize_(0)
    with pytest.raises(ValueError, match=r"tensors\[1\] has no memory"):
        pack(held, plan)
    storage.resize_(40)
    unpack(torch.arange(32.0), plan, held)
    assert tensors[1].flatten().tolist() == list(range(6, 16))
    tensors[1].resize_(9)
    with pytest.raises(ValueError, match=r"tensors\[1\] has 9 elements, but the plan was made for 10"):
        pack(held, plan)
    tensors[1].data = torch.arange(20.0)[::2]  # strided: read as an ordinary list is
    assert pack(held, plan)[6:16].tolist() == list(range(0, 20, 2))
    with pytest.raises(ValueError, match=r"tensors\[1\] is on meta, but out is on cpu"):
        pack(TensorList([tensors[0], torch.empty(10, device="meta")]), plan, torch.zeros(32))


def test_tensor_lists_of_what_only_the_dispatcher_takes(pair):
    tensors, plan = pair
    assert torch.equal(pack(TensorList([None, None]), plan), torch.zeros(32))
    assert pack(TensorList([]), FlatPlan([], [], [], 2)).numel() == 0
    negated = torch.zeros(10, dtype=torch.cfloat).add(1j).conj().imag
    assert pack(TensorList([tensors[0], negated]), plan)[6:16].tolist() == [-1.0] * 10
    with FakeTensorMode() as mode:
        pack(TensorList([mode.from_tensor(t) for t in tensors]), plan)
    with pytest.raises(TypeError, match=r"tensors\[1\] is a int; it must be a tensor or None"):
        TensorList([tensors[0], 3])
    with pytest.raises(TypeError, match="tensors is a single tensor; it must be a sequence of them"):
        TensorList(tensors[0])


@pytest.mark.parametrize("through", ["eager", "dispatcher"])
def test_shared_memory_is_refused(pair, through, monkeypatch):
    if through == "dispatcher":
        monkeypatch.setattr(flat_ops, "_eager", lambda: False)
    tensors, plan = pair
    flat = torch.zeros(32)
    base = torch.zeros(20)
    with pytest.raises(ValueError, match=r"tensors\[0\] shares memory with the flat buffer that is written"):
        pack([flat[3:9], tensors[1]], plan, flat)
    with pytest.raises(ValueError, match=r"tensors\[1\] shares memory with the flat buffer that is read"):
        unpack(flat, plan, [tensors[0], flat[:10]])
    with pytest.raises(ValueError, match=r"tensors\[\d\] and tensors\[\d\] share memory"):
        unpack(flat + 1, plan, [base[:6], base[5:15]])
    with pytest.raises(ValueError, match=r"tensors\[1\] has several elements at the same address"):
        unpack(flat + 1, plan, [tensors[0], base[:5].expand(2, 5)])
    assert base.count_nonzero() == 0
    # Interleaved views share an address range, but no element.
    columns = torch.zeros(6, 2)
    plan = FlatPlan([6, 6], ["float32"] * 2, [True] * 2, 1)
    unpack(torch.arange(16.0), plan, [columns[:, 0], columns[:, 1]])
    assert columns.t().flatten().tolist() == list(range(12))
    with pytest.raises(ValueError, match="share memory"):
        unpack(torch.zeros(16), plan, [columns[:, 0], columns.view(-1)[2:8]])


def test_unpack_refuses_none_and_freed_storage(pair):
    tensors, plan = pair
    flat = pack(tensors, plan)
    with pytest.raises(ValueError, match=r"tensors\[0\] is None"):
        unpack(flat, plan, [None, tensors[1]])
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"tensors\[1\] has no memory"):
        unpack(flat, plan, tensors)


@pytest.mark.parametrize("stats", [torch.zeros(3), torch.zeros(2, dtype=torch.float16), torch.zeros(2, device="meta")])
def test_bad_stats_are_refused(pair, stats):
    with pytest.raises(ValueError, match="stats must be a float32 or float64 tensor of shape"):
        pack(*pair, stats=stats)


# --- sum_rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_sum_rows_equals_reference(kernels, dtype, out_dtype):
    for world_size, n in ((1, 5), (3, 1000), (17, 333)):
        rows = torch.randn(world_size, n).to(dtype)
        for accumulate in (False, True):
            out = torch.randn(n).to(out_dtype)
            expected, stats, expected_stats = out.clone(), torch.zeros(2).double(), torch.zeros(2).double()
            sum_rows(rows, out, scale=1 / 3, accumulate=accumulate, stats=stats)
            sum_rows_reference(rows, expected, scale=1 / 3, accumulate=accumulate, stats=expected_stats)
            assert same(out, expected)
            torch.testing.assert_close(stats, expected_stats, rtol=1e-12, atol=0)


def test_sum_rows_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"rows must be \[world_size, n\]"):
        sum_rows(torch.zeros(2, 5), torch.zeros(4))
    with pytest.raises(ValueError, match="share memory"):
        rows = torch.zeros(2, 5)
        sum_rows(rows, rows[0])


# --- as operators ----------------------------------------------------------------------------------------------------


def test_opcheck():
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), None]
    plan = FlatPlan([15, 7, 4], ["float32"] * 3, [True, False, True], 2)
    flat, stats = torch.empty(plan.flat_bytes // 4), torch.zeros(2)
    torch.library.opcheck(torch.ops.moe_zero.pack_, (flat, tensors, plan.table, None, 0.5, None, None))
    torch.library.opcheck(torch.ops.moe_zero.pack_, (flat, tensors, plan.table, None, 1.0, stats, None))
    targets = [torch.randn(5, 3).t(), torch.randn(7), torch.randn(4)]
    torch.library.opcheck(torch.ops.moe_zero.unpack_, (targets, pack(tensors, plan), plan.table, None, True))
    torch.library.opcheck(torch.ops.moe_zero.sum_rows_, (torch.zeros(6), torch.randn(2, 6), 0.5, True, None, None))


def test_compiles_into_one_graph():
    plan = FlatPlan([15, 7], ["bfloat16"] * 2, [True, True], 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_trip(a, b):
        flat = pack([a * 2, b * 2], plan, scale=0.5)
        targets = [torch.empty_like(a), torch.empty_like(b)]
        unpack(flat, plan, targets)
        return targets

    a, b = torch.randn(3, 5), torch.randn(7)
    for got, source in zip(round_trip(a, b), (a, b), strict=True):
        assert torch.equal(got, source.bfloat16().float())


def test_fake_tensors_pass_through(pair):
    _, plan = pair
    with FakeTensorMode():
        tensors = [torch.ones(6), torch.ones(2, 5)]
        flat = pack(tensors, plan, stats=torch.zeros(2))
        assert (flat.shape, flat.dtype) == ((32,), torch.float32)
        unpack(flat, plan, tensors, accumulate=True)
        sum_rows(flat.view(2, 16), torch.zeros(16))


def test_autograd_notices_that_a_saved_tensor_was_overwritten(pair):
    tensors, plan = pair
    for through in (True, False):
        weight = torch.ones(6, requires_grad=True)
        out = (weight * tensors[0]).sum()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_ops, "_eager", lambda through=through: through)
            unpack(torch.zeros(32), plan, tensors)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_parameters_that_need_gradients_can_be_packed_and_written():
    parameters = [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]
    plan = FlatPlan([16, 4], ["float32"] * 2, [True] * 2, 2)
    flat = pack(parameters, plan)
    assert not flat.requires_grad
    unpack(flat * 2, plan, parameters)
    assert torch.equal(pack(parameters, plan), flat * 2)


def test_plain_tensors_skip_the_dispatcher_and_others_do_not(pair):
    tensors, plan = pair
    out = torch.zeros(32)
    arguments = (None, plan.table, None, 1.0, None, None)
    assert _extensions.ops_cpu.pack(out, tensors, *arguments)
    assert _extensions.ops_cpu.pack(out, [torch.nn.Parameter(t) for t in tensors], *arguments)
    assert not _extensions.ops_cpu.pack(out, [tensors[0], tensors[1].int()], *arguments)
    assert not _extensions.ops_cpu.pack(out, [tensors[0], torch.ones(10, device="meta")], *arguments)
    assert not _extensions.ops_cpu.pack(out, [tensors[0], torch.zeros(10, dtype=torch.cfloat).conj().imag], *arguments)


def test_negated_view_is_packed_as_it_reads():
    source = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert source.is_neg()
    plan = FlatPlan([2], ["float32"], [True], 1)
    assert pack([source], plan)[:2].tolist() == [-2, 4]
    with pytest.raises(ValueError, match="negated"):
        unpack(torch.zeros(16), plan, [source])


def test_reference_runs_where_the_extension_is_missing(pair, monkeypatch):
    tensors, plan = pair
    expected = pack(tensors, plan)
    monkeypatch.setattr(_extensions, "ops_cpu", None)
    assert torch.equal(pack(tensors, plan), expected)
    targets = [torch.zeros_like(t) for t in tensors]
    unpack(expected, plan, targets)
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))
