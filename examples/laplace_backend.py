"""A Jacobian backend for `laplace-torch` (pip install laplace-torch): full and last-layer posteriors from ntkfl."""

import torch
from laplace import Laplace
from laplace.curvature import GGNInterface
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntkfl


class TangentGGN(GGNInterface):  # type: ignore[misc]
    """The Gauss–Newton matrix Jᵀ Λ J with J from `ntkfl.jacobian`: Laplace(..., backend=TangentGGN)."""

    def jacobians(self, x: Tensor, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """J [N, d2, d] and f [N, d2], with `enable_backprop` to be differentiated in x and the weights."""
        return self._of(self.model, x, enable_backprop)

    def last_layer_jacobians(self, x: Tensor, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """The same for the last layer's weights, whose inputs are the features of x."""
        with torch.set_grad_enabled(enable_backprop):
            _, features = self.model.forward_with_features(x)
        return self._of(self.model.last_layer, features, enable_backprop)

    def _of(self, model: nn.Module, x: Tensor, enable_backprop: bool) -> tuple[Tensor, Tensor]:
        J = ntkfl.jacobian(model, x, create_graph=enable_backprop).dense()
        if self.subnetwork_indices is not None:
            J = J[:, :, self.subnetwork_indices]
        with torch.set_grad_enabled(enable_backprop):
            return J, model(x)


def main() -> None:
    torch.manual_seed(0)
    x, y = ntkfl.data.load("digits").rows.take(torch.arange(100))
    x = x.double()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    data = DataLoader(TensorDataset(x, y), batch_size=50)
    for weights in ("all", "last_layer"):
        ours, theirs = (
            Laplace(model, "classification", weights, "full", prior_precision=1.0, **backend)
            for backend in ({"backend": TangentGGN}, {})
        )
        ours.fit(data)
        theirs.fit(data)
        apart = (ours.H - theirs.H).norm() / theirs.H.norm()
        p, q = (posterior(x[:20], pred_type="glm", link_approx="probit") for posterior in (ours, theirs))
        evidence = ours.log_marginal_likelihood() / theirs.log_marginal_likelihood() - 1
        mine = ours.backend.last_layer_jacobians if weights == "last_layer" else ours.backend.jacobians
        own = GGNInterface.last_layer_jacobians if weights == "last_layer" else GGNInterface.jacobians
        rows, expected = mine(x)[0], own(ours.backend, x)[0]
        print(f"{weights}: {ours.n_params} weights; Jacobians differ by {(rows - expected).abs().max():.0e}, ", end="")
        print(f"curvature by {apart:.0e}, ", end="")
        print(f"predictions by {(p - q).abs().max():.0e}, evidence by {evidence.abs():.0e}")


if __name__ == "__main__":
    main()
