from abc import ABCMeta, abstractmethod
from enum import Enum
from pathlib import Path
from typing import Any

class QuantFormat(Enum):
    QOperator = 0
    QDQ = 1

class QuantType(Enum):
    QInt8 = 0
    QUInt8 = 1

class CalibrationDataReader(metaclass=ABCMeta):
    @abstractmethod
    def get_next(self) -> dict[str, Any] | None: ...

def quantize_static(
    model_input: str | Path,
    model_output: str | Path,
    calibration_data_reader: CalibrationDataReader,
    quant_format: QuantFormat = ...,
    per_channel: bool = ...,
    activation_type: QuantType = ...,
    weight_type: QuantType = ...,
) -> None: ...
