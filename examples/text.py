"""Reviews of six shops, synthetic and drawn here: one round on a frozen text model, though most shops know one opinion.

Five of the six have had nearly only praise, or nearly only complaints.
"""

import random
import zlib

import torch
from torch import nn

import ntkfl

draw = random.Random(0)
GOODS = ("coffee", "shoes", "lamp", "novel", "bicycle", "kettle")
PRAISE, BLAME, OTHER = (
    words.split()
    for words in (
        "lovely sturdy quick bright kind tasty warm neat clever fine smooth happy fresh honest superb",
        "broken late dull noisy rude stale torn weak cold dirty cheap wrong sad faded awful",
        "the it was we bought last week for my brother with a box and paper from this shop online again",
    )
)


def review(happy: bool) -> str:
    opinion = [draw.choice(PRAISE if happy == (draw.random() < 0.75) else BLAME) for _ in range(5)]
    words = [draw.choice(GOODS), *opinion, *draw.choices(OTHER, k=12)]
    return " ".join(draw.sample(words, len(words)))


def tokens(texts: list[str], length: int = 24) -> torch.Tensor:  # transformers: AutoTokenizer(texts, …)["input_ids"]
    rows = [[zlib.crc32(word.encode()) % 4095 + 1 for word in text.split()][:length] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def shop(count: int, praise: float) -> tuple[torch.Tensor, torch.Tensor]:
    labels = [draw.random() < praise for _ in range(count)]
    return tokens([review(happy) for happy in labels]), torch.tensor(labels).long()


shops = [shop(80, praise) for praise in (1.0, 1.0, 0.97, 0.0, 0.03, 0.5)]
test = shop(600, 0.5)
fed = ntkfl.data.from_clients(shops, test=test, tokens=True)

torch.manual_seed(0)
backbone = nn.Embedding(4096, 128, padding_idx=0)  # stands for a pretrained model, which gives [N, words, features]:
# backbone = transformers.AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  and below  features=384
model = ntkfl.models.head(backbone, outputs=2, features=128, pool="mean")
run = ntkfl.train(model, fed, ntkfl.methods.SumRidge(), rounds=1, clients_per_round=6, callbacks=[])
print(f"sum-ridge after one round: {run.history[-1]['test_accuracy']:.1%}")
averaged = ntkfl.train(model, fed, ntkfl.methods.FedAvg(lr=0.5), rounds=10, clients_per_round=6, callbacks=[])
print(f"FedAvg after one and after ten: {[round(r['test_accuracy'], 3) for r in averaged.history[::9]]}")
alone = ntkfl.data.from_clients(shops[:1], test=test, tokens=True, classes=2)
run = ntkfl.train(model, alone, ntkfl.methods.SumRidge(), rounds=1, clients_per_round=1, callbacks=[])
print(f"the first shop alone: {run.history[-1]['test_accuracy']:.1%}")
