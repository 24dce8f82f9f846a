"""What a run says about itself. Law: tracking listens and never holds up training; names and units live in one table."""
