"""Whole models as safetensors: out under unsharded names, and back."""

import json
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from moe_zero.zero import export_safetensors, load_safetensors, shard

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def make(seed=0):
    torch.manual_seed(seed)
    return shard(Net(), nn.Sequential)


def one_at_a_time(gather, gathered):
    """Sees to it that no layer is gathered while more than the last tensor of others is there (rank 0 fills a file)."""

    def watched():
        assert is_first() or sum(ref() is not None for ref in gathered) <= 1
        values = gather()
        gathered.extend(map(weakref.ref, values))
        return values

    return watched


def exported(directory, options):
    sharded = make()
    expected, gathered = sharded.state_dict_full(), []
    for layer in sharded.flat_layers:
        layer.gather_values = one_at_a_time(layer.gather_values, gathered)
    files = export_safetensors(directory, sharded, **options)
    assert gathered
    return [file.name for file in files], expected


def loaded(path):
    sharded = make(seed=1)
    assert load_safetensors(path, sharded) == ([], [])
    return sharded.state_dict_full()


def assert_same(state, expected, dtype=None):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        converted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert state[name].dtype == converted.dtype and torch.equal(state[name], converted), name


@pytest.mark.parametrize("world_size", [0, 2])
def test_one_file_for_a_small_model(world_size, on_ranks, tmp_path):
    files, expected = on_ranks(world_size, exported, tmp_path, {})[0]
    assert files == ["model.safetensors"] == [path.name for path in tmp_path.iterdir()]
    state = load_file(tmp_path / files[0])
    assert_same(state, expected)
    Net().load_state_dict(state, strict=True)
    for found in on_ranks(3, loaded, tmp_path / files[0]):
        assert_same(found, expected)


def test_several_files_with_an_index_for_a_large_one(on_ranks, tmp_path):
    files, expected = on_ranks(2, exported, tmp_path, {"max_file_bytes": 300})[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == expected.keys() and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for file in files:
        state = load_file(tmp_path / file)
        assert sum(value.nbytes for value in state.values()) <= 300 or len(state) == 1
    for world_size in (0, 2):
        for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
            assert_same(on_ranks(world_size, loaded, path)[0], expected)
    # Another export takes the place of the first.
    files, expected = on_ranks(2, exported, tmp_path, {"dtype": torch.bfloat16})[0]
    assert [path.name for path in tmp_path.iterdir()] == files
    assert_same(load_file(tmp_path / files[0]), expected, torch.bfloat16)


def mesh_export(directory):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    sharded = shard(Net(), nn.Sequential, mesh)
    export_safetensors(directory, sharded)
    sharded.load_state_dict_full({name: torch.zeros_like(v) for name, v in sharded.state_dict_full().items()})
    load_safetensors(directory, sharded)
    return sharded.state_dict_full()


def test_replicas_write_once_and_read_alike(on_ranks, tmp_path):
    for state in on_ranks(4, mesh_export, tmp_path):
        assert_same(state, load_file(tmp_path / "model.safetensors"))


def refused(directory):
    sharded = make()
    before = sharded.state_dict_full()
    good = {name: value.clone() for name, value in before.items()}
    cases = {
        "nothing": (None, FileNotFoundError, "there is no .*nothing"),
        "lacks": ({"head.weight": good["head.weight"]}, ValueError, "state lacks .*blocks.0.0.weight"),
        "shape": (
            {**good, "blocks.2.0.bias": torch.zeros(7)},
            ValueError,
            r"has shape \(7,\); the model has \(6,\)",
        ),
        "damaged": (b"no safetensors", ValueError, "damaged.model.safetensors is damaged or no safetensors file"),
    }
    for name, (content, kind, message) in cases.items():
        folder = directory / name
        if is_first() and content is not None:
            folder.mkdir()
            file = folder / "model.safetensors"
            file.write_bytes(content) if isinstance(content, bytes) else save_file(content, file)
        with pytest.raises(kind if is_first() else RuntimeError, match=message):
            load_safetensors(folder, sharded)
    with pytest.raises(ValueError, match="max_file_bytes is 0; it must be at least 1"):
        export_safetensors(directory, sharded, max_file_bytes=0)
    if is_first():
        (directory / "file").write_text("")
    with pytest.raises(OSError if is_first() else RuntimeError, match="exists"):
        export_safetensors(directory / "file", sharded)
    assert_same(sharded.state_dict_full(), before)
    missing, unexpected = load_safetensors(directory / "lacks", sharded, strict=False)
    assert "blocks.0.0.weight" in missing and unexpected == []


@pytest.mark.parametrize("world_size", [0, 2])
def test_what_does_not_fit_is_refused_on_all_ranks(world_size, on_ranks, tmp_path):
    on_ranks(world_size, refused, tmp_path)
