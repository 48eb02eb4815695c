"""Steps by orthogonalized directions (Muon): momentum, Newton-Schulz on whole matrices wave by wave, and the update."""
