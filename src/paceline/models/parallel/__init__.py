"""One model on several ranks (processes): rank 0 decides, the others follow."""
