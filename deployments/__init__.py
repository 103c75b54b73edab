"""Acts: performs over engines and links what a policy decided."""
