"""NTK-FL and CP-NTK-FL: clients send a row per sample, its Jacobian, outputs and label."""
