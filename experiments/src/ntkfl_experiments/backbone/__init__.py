"""CIFAR-10 behind a frozen EfficientNet-Lite0, reviews behind word vectors: the figures of docs/methods.md."""
