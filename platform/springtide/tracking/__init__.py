"""What a run reports. Layer rule: tracking listens and never delays training; names and units live in one table."""
