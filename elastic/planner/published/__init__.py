"""Published models and measurements, and how well predictions match them."""
