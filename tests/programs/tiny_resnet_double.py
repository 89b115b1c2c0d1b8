"""As tiny_resnet.py in float64: a rounding that a kink of ReLU makes large stays far below what an
error would do."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_resnet import Images, ResNet
from tiny_resnet import program as single


class DoubleImages(Images):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"input": sample["input"].double()}


program = replace(
    single, model=lambda: ResNet().to(torch.float64), dataset=DoubleImages, validation=DoubleImages
)
