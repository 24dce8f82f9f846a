"""What a run says about itself. Rule: tracking listens and never holds up training; names and units live in one table."""
