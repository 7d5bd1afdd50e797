// GW_RETURN_IF_ERROR and GW_ASSIGN_OR_RETURN: absl::Status without the noise.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define GW_RETURN_IF_ERROR(expr)                                            \
  do {                                                                      \
    if (absl::Status gw_status = (expr); !gw_status.ok()) return gw_status; \
  } while (0)

#define GW_CONCAT_INNER(a, b) a##b
#define GW_CONCAT(a, b) GW_CONCAT_INNER(a, b)
#define GW_ASSIGN_OR_RETURN(lhs, expr) GW_ASSIGN_OR_RETURN_IMPL(GW_CONCAT(gw_statusor_, __LINE__), lhs, expr)
#define GW_ASSIGN_OR_RETURN_IMPL(var, lhs, expr) \
  auto var = (expr);                             \
  if (!var.ok()) return var.status();            \
  lhs = *std::move(var)
