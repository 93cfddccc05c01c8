"""What published annotation formats share: files, rows, boxes, windows, choices, media."""
