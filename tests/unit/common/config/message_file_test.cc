// What files may say, and what a wrong one is told: file, line, field, found, expected.
#include "common/config/message_file.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "gradwire/v1/job.pb.h"
#include "gradwire/v1/server_config.pb.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::HasSubstr;

absl::Status Yaml(const std::string& text, google::protobuf::Message* message) {
  return ParseMessageText(text, "f.yaml", MessageFormat::kYaml, message);
}

std::string ErrorOf(const std::string& text) {
  v1::JobSpec spec;
  const absl::Status status = Yaml(text, &spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(status.message());
}

// 9,000,000 numbers in 15 KB.
TEST(MessageFile, RefusesAliasesThatGrowWithoutBound) {
  constexpr int kRepeats = 3000;
  std::string text = "tensors: [&a {name: w, shape: [1";
  for (int i = 1; i < kRepeats; ++i) text += ",1";
  text += "]}";
  for (int i = 1; i < kRepeats; ++i) text += ",*a";
  text += "]";
  EXPECT_THAT(ErrorOf(text), HasSubstr("aliases repeat too much"));
}

// yaml-cpp finds empty documents in these without end.
TEST(MessageFile, RefusesTextsOfEndlessDocuments) {
  for (const char* text : {",", "a: 1\n]", "name: x\n}"})
    EXPECT_THAT(ErrorOf(text), HasSubstr("f.yaml: line ")) << text;
}

TEST(MessageFile, TakesAliasesOfModestSize) {
  std::string text = "optimizer: {kind: OPTIMIZER_SGD, groups: [&g {momentum: 0.9, nesterov: true}";
  for (int i = 1; i < 64; ++i) text += ",*g";
  v1::JobSpec spec;
  ASSERT_EQ(Yaml(text + "]}", &spec), absl::OkStatus());
  EXPECT_EQ(spec.optimizer().groups_size(), 64);
  EXPECT_EQ(spec.optimizer().groups(63).momentum(), 0.9f);
}

TEST(MessageFile, YamlJsonAndTextGiveTheSameMessage) {
  v1::JobSpec yaml, json, text;
  ASSERT_EQ(Yaml(R"(
name: gpt
tensors:
  - {name: embed.weight, shape: [50, 40], role: ROLE_EMBEDDING}
  - name: norm
    shape: 40         # one value where a list has one
optimizer:
  kind: OPTIMIZER_SGD
  groups: [{momentum: 0.9, nesterov: true, weight_decay: 1e-2}]
rules:
- pattern: "*.bias"
  codec: dense:values=fixed16
seed: 18446744073709551615
)",
                 &yaml),
            absl::OkStatus());
  ASSERT_EQ(Yaml(R"({"name": "gpt", "tensors": [{"name": "embed.weight", "shape": [50, 40], "role": "ROLE_EMBEDDING"},
      {"name": "norm", "shape": ["40"]}], "optimizer": {"kind": "OPTIMIZER_SGD", "groups": [
      {"momentum": 0.9, "nesterov": true, "weight_decay": 0.01}]},
      "rules": [{"pattern": "*.bias", "codec": "dense:values=fixed16"}], "seed": "18446744073709551615"})",
                 &json),
            absl::OkStatus());
  ASSERT_EQ(ParseMessageText(R"(name: "gpt" tensors { name: "embed.weight" shape: [50, 40] role: ROLE_EMBEDDING }
      tensors { name: "norm" shape: 40 }
      optimizer { kind: OPTIMIZER_SGD groups { momentum: 0.9 nesterov: true weight_decay: 0.01 } }
      rules { pattern: "*.bias" codec: "dense:values=fixed16" } seed: 18446744073709551615)",
                             "f.textproto", MessageFormat::kText, &text),
            absl::OkStatus());
  using google::protobuf::util::MessageDifferencer;
  EXPECT_TRUE(MessageDifferencer::Equals(yaml, text)) << yaml.DebugString();
  EXPECT_TRUE(MessageDifferencer::Equals(json, text)) << json.DebugString();
}

TEST(MessageFile, YamlErrorsNameLineFieldFoundAndExpected) {
  EXPECT_EQ(ErrorOf("name: j\nmin_worker: 2\n"),
            "f.yaml: line 2: gradwire.v1.JobSpec has no field 'min_worker': did you mean 'min_workers'?");
  EXPECT_EQ(ErrorOf("name: j\ntensors:\n- name: a\n  shape: [2, x]\n"),
            "f.yaml: line 4: tensors[0].shape[1]: expected a whole number from 0 to 18446744073709551615, found 'x'");
  EXPECT_EQ(ErrorOf("min_workers: -1"),
            "f.yaml: line 1: min_workers: expected a whole number from 0 to 4294967295, found '-1'");
  EXPECT_EQ(ErrorOf("min_workers: 4294967296"),
            "f.yaml: line 1: min_workers: expected a whole number from 0 to 4294967295, found '4294967296'");
  EXPECT_EQ(ErrorOf("min_workers: 1.5"),
            "f.yaml: line 1: min_workers: expected a whole number from 0 to 4294967295, found '1.5'");
  EXPECT_EQ(ErrorOf("min_workers:\nname: j"), "f.yaml: line 1: min_workers: has no value");
  EXPECT_EQ(ErrorOf("name: [a, b]"), "f.yaml: line 1: name: expected a text, found a list");
  EXPECT_EQ(ErrorOf("optimizer: adamw"),
            "f.yaml: line 1: optimizer: expected a map of the fields of gradwire.v1.OptimizerSpec, found 'adamw'");
  EXPECT_THAT(ErrorOf("push: STEP"), AllOf(HasSubstr("push: expected one of"), HasSubstr("PUSH_STEP")));
  EXPECT_THAT(ErrorOf("optimizer: {groups: [{nesterov: yes}]}"),
              HasSubstr("optimizer.groups[0].nesterov: expected true or false, found 'yes'"));
  EXPECT_THAT(ErrorOf("step: {beta2: much}"), HasSubstr("step.beta2: expected a number, found 'much'"));
  EXPECT_THAT(ErrorOf("name: a\nname: b"), HasSubstr("line 2: name: appears twice"));
  EXPECT_THAT(ErrorOf("? [a]\n: b"), HasSubstr("must be a plain word"));
  EXPECT_THAT(ErrorOf("- name"), HasSubstr("found a list"));
  EXPECT_THAT(ErrorOf("name: a\n---\nname: b"), HasSubstr("one document was expected"));
  EXPECT_THAT(ErrorOf("name: a\n  seed: [1"), AllOf(HasSubstr("f.yaml: line "), HasSubstr("not YAML")));
}

TEST(MessageFile, NothingIsAnError) {
  for (const std::string text : {"", " \n", "# only a comment\n", "{}", "~"}) {
    v1::JobSpec spec;
    EXPECT_THAT(ErrorOf(text), testing::AnyOf(HasSubstr("is empty"), HasSubstr("sets nothing"))) << text;
    if (text == "{}" || text == "~") continue;
    EXPECT_FALSE(ParseMessageText(text, "f.textproto", MessageFormat::kText, &spec).ok()) << text;
  }
  EXPECT_THAT(ErrorOf(std::string("name\0", 5)), HasSubstr("not a text"));
}

TEST(MessageFile, DeeplyNestedYamlIsRefused) {
  EXPECT_THAT(ErrorOf("name: " + std::string(100'000, '[')), HasSubstr("f.yaml: line "));
}

TEST(MessageFile, UnknownFieldOfTextFormatIsToldTheNearest) {
  v1::JobSpec spec;
  const auto error = [&](const std::string& text) {
    return std::string(ParseMessageText(text, "f.textproto", MessageFormat::kText, &spec).message());
  };
  EXPECT_THAT(error("name: \"j\"\nmin_worker: 2"),
              AllOf(HasSubstr("f.textproto: line 2"), HasSubstr("did you mean 'min_workers'?")));
  EXPECT_THAT(error("optimizer { knd: OPTIMIZER_SGD }"),
              AllOf(HasSubstr("gradwire.v1.OptimizerSpec"), HasSubstr("did you mean 'kind'?")));
  EXPECT_THAT(error("min_workers: \"two\""), HasSubstr("f.textproto: line 1"));
}

class ReadMessageFileTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = testing::TempDir() + "/" + name;
    std::ofstream(path) << text;
    return path;
  }
  v1::ServerConfig config_;
};

TEST_F(ReadMessageFileTest, TheEndingTellsTheFormat) {
  for (const std::string ending : {".yaml", ".yml", ".json", ".YAML"})
    EXPECT_EQ(ReadMessageFile(Write("c" + ending, "{max_jobs: 3}"), &config_), absl::OkStatus()) << ending;
  for (const std::string ending : {".textproto", ".txtpb", ".pbtxt", ".prototxt"})
    EXPECT_EQ(ReadMessageFile(Write("c" + ending, "max_jobs: 3 drain_ms: 1"), &config_), absl::OkStatus()) << ending;
  EXPECT_EQ(config_.max_jobs(), 3u);
  for (const std::string ending : {"", ".conf", ".yaml.bak"}) {
    const absl::Status status = ReadMessageFile(Write("c" + ending, "max_jobs: 3"), &config_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << ending;
    EXPECT_THAT(status.message(), AllOf(HasSubstr(".yaml"), HasSubstr(".textproto"))) << ending;
  }
}

TEST_F(ReadMessageFileTest, WhatCannotBeReadIsNamed) {
  const absl::Status missing = ReadMessageFile("/no/such/file.yaml", &config_);
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr("/no/such/file.yaml"));
  const std::string folder = testing::TempDir() + "/folder.yaml";
  mkdir(folder.c_str(), 0755);
  EXPECT_THAT(ReadMessageFile(folder, &config_).message(), HasSubstr("is a folder"));
  EXPECT_THAT(ReadMessageFile(Write("empty.yaml", ""), &config_).message(), HasSubstr("empty.yaml: is empty"));
  EXPECT_THAT(ReadMessageFile("/proc/self/mem.yaml", &config_).message(), HasSubstr("cannot read"));
}

}  // namespace
}  // namespace gradwire
