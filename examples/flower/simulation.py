"""A simulation on Flower: your own clients and your own network, a round's clients spread over this machine's cores.

The same as `ntkfl flower simulate CONFIG` with a TOML of these settings; needs the extra `flower`. Clients run in
processes of Ray's, so data and network are named, not passed: each process imports workshops.py, beside this file.
"""

from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from ntkfl.flower.simulate import simulate

config = RunConfig(
    rounds=3,
    clients_per_round=4,
    data={"dataset": "workshops:clients"},
    model={"name": "workshops:network", "options": {"width": 12}},
    method={"name": "ntk-fl"},
)

if __name__ == "__main__":
    run = simulate(config)
    print(f"test accuracy by round: {[round(record['test_accuracy'], 3) for record in run.history]}")

    # The same in this process: Flower carries messages and changes nothing.
    here = execute(config).model.state_dict()
    apart = max(float((value - here[name]).abs().max()) for name, value in run.model.state_dict().items())
    print(f"largest difference from a run in one process, of all weights: {apart:.0e}")
