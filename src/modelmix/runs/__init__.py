"""A run as files: its folder, the record that is kept there, its events, and the page that is drawn from them."""
