"""The report as one HTML file that needs no network: what the text report says, with plots, and answers on click."""
