"""A pretrained network, a new linear head, one round: the exact solution of all clients' pooled data."""

import torch
from torch import nn

import ntkfl

torch.manual_seed(0)
backbone = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten())  # stands for a real one:
# backbone = torchvision.models.resnet18(weights="DEFAULT")  and below  drop="fc", inputs=(3, 224, 224)
# backbone = timm.create_model("vit_small_patch16_224", pretrained=True, num_classes=0)  with  inputs=(3, 224, 224)
model = ntkfl.models.head(backbone, outputs=10, inputs=(1, 8, 8))
fed = ntkfl.data.load("digits").partition(ntkfl.data.Shards(clients=30, per_client=1), seed=0)  # one label per client
run = ntkfl.train(model, fed, ntkfl.methods.SumRidge(), rounds=1, clients_per_round=30)
print(f"accuracy after one round: {run.history[-1]['test_accuracy']:.1%}")
