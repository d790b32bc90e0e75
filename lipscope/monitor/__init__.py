"""The local Lipschitz constants of layers, monitored while a model trains."""
