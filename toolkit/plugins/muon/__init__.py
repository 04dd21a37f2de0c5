"""`optim.name: muon`: Muon for hidden matrices and AdamW for the rest."""
