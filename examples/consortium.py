"""Five hospitals with 2,000 records each: data to try a private run on, and what its ε means in other cases.

    ntkfl train --dataset examples.consortium:hospitals --private --rounds 10 --set epsilon=3 --set sum_samples=2000
    python examples/consortium.py

docs/privacy.md has what comes of it. The records are pictures of Fashion-MNIST (`ntkfl data fetch
fashion-mnist`). How they are dealt does not matter: all hospitals are in every round, and their sums are added.
"""

import ntkfl
from ntkfl.privacy.sum_noise import budget, spent

DELTA = 1e-5


def hospitals() -> ntkfl.data.Federated:
    dealt = ntkfl.data.load("fashion-mnist").partition(ntkfl.data.IID(clients=30), seed=0)  # 60,000 records
    return ntkfl.data.from_clients([dealt.client(i) for i in range(5)], test=dealt.test)


if __name__ == "__main__":
    print(f"ε at δ = {DELTA} of: the run; two runs; a person with 2 records, 5 records; if one of five adds no noise")
    for epsilon in (1.0, 3.0, 8.0):
        rho = budget(epsilon, DELTA)  # concentrated differential privacy of all rounds together
        # ρ adds up over runs, and grows with the square of a person's records and with one over the noise's variance.
        cases = [rho, 2 * rho, 2**2 * rho, 5**2 * rho, rho * 5 / 4]
        print("  ".join(f"{spent([(case, 1)], DELTA):5.2f}" for case in cases))
