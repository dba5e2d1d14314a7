"""The report as one self-contained HTML file: the text report with plots, and answers on click."""
