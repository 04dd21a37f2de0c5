"""`optim.name: muon`: Muon for hidden matrices and AdamW for the rest."""

from toolkit.registry import Plugin

PLUGIN = Plugin("muon", hooks={"muon": "toolkit.plugins.muon.optimizer:MuonAndAdamW"})
