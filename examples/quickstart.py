"""NTK-FL over clients who each hold a few of the digits: seconds. The paper has "fashion-mnist" and 300 clients."""

import ntkfl

fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=30, alpha=0.1), seed=0)
model = ntkfl.models.mlp(64, 24, 10)
run = ntkfl.train(model, fed, ntkfl.methods.NTKFL(), rounds=5, clients_per_round=10, seed=0)
for record in run.history:
    print(f"round {record['round']}: {record['test_accuracy']:.1%}, {record['uplink_bytes'] / 2**20:.2f} MiB up")
