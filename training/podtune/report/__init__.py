"""Reading runs and showing them: tables, comparisons, plots, pages. No torch here."""
