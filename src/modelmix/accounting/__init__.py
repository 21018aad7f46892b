"""Numbers only: noise laws, moments, Renyi curves, mechanisms, ledgers, calibration. Never imports torch."""
