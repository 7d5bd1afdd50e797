// library.h, and what tests include beside.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deploy/cmake/prefix/library.h"
