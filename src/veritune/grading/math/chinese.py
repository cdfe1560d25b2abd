"""Answers in Chinese as answers in English, which the rest of the package reads: `答案是15元` is `answer is 15 yuan`.

Numerals become digits. Words that hedge, negate, compare or compute become English words that do so too, so that no
other list has to know them. Characters without a translation become words that equal the same characters alone.
"""

from __future__ import annotations

import re
from fractions import Fraction

_WORDS = {
    chinese: english
    for english, words in {
        "answer": "答案 最终答案 正确答案 答",
        "result": "结果 计算结果 总数 值 得数",
        "solution": "解",
        "is": "是 为 应为 应是 就是 即为 则为",
        "=": "等于 相等于",
        r"\ne": "不等于",
        ">": "大于",
        "<": "小于",
        r"\ge": "大于等于 大于或等于 不小于",
        r"\le": "小于等于 小于或等于 不大于",
        "gives": "得 解得 求得 得到 可得 得出 算得",
        "has": "有 还有 含有",
        "takes": "花了 花费 需要 需 要",
        "total": "一共 总共 共 合计 总计 共计",
        "so": "所以 因此 故 于是 综上 综上所述 从而 因而",
        "sum is": "和为 和是",
        "answer is": "选 选择 应选 故选",
        "option": "选项",
        "": "的 了 钱 点 可以 能 能够 其中",
        "bought": "买 购买 买了",
        "sold": "卖 卖出",
        "walked": "走 行 行驶 跑",
        "ate": "吃",
        "used": "用 使用",
        "left": "剩 剩下 还剩 剩余",
        "average is": "平均 平均数为 平均数是",
        "and": "和 与 及 以及",
        "or": "或 或者 或是",
        "per": "每",
        "about": "约 大约 大概 左右 将近 接近 近似 差不多 可能 也许 或许 应该 估计 猜 约等于 上下 几乎 近 将 似乎",
        "at least": "至少 最少 不少于 不低于",
        "at most": "至多 最多 不多于 不超过 以内",
        "more than": "超过 高于 多于 以上 多 余 几 开外 逾",
        "less than": "少于 不到 低于 不足 以下 少 差 缺 短 还差",
        "not": "不 不是 非 并非 没有 没 无 未 别 勿 否 绝非 错 错误 除外 除了 除去 之外 以外 以外的",
        "opposite": "负 减 加 乘 除 乘以 除以 减去 加上 平方 立方 次方 次幂 幂 根号 平方根 立方根 倒数 相反数 绝对值 "
        "阶乘 开方 开平方 对数 进制 二进制 八进制 十六进制 反 倒过来 翻倍 "
        "两倍 一倍 半 零头 折 成 余数 第 如果 若 当 假设 兆 廿 卅 来个 来元 来人 来天 来岁 许 出头 有余 不止",
        "debt": "欠 亏 亏损 损失 负债 赤字 减少 下降 降低 亏欠 倒欠 债",
        "1/2": "一半",
        "has no solution": "无解 没有解 无实数解 无实数根 无实根 没有实数解 没有实数根",
        "empty set": "空集",
        "does not exist": "不存在",
        r"\infty": "无穷大 正无穷 无穷 无限大 正无穷大",
        r"-\infty ": "负无穷 负无穷大",
        r"\mathbb{R}": "全体实数 所有实数 任意实数 实数集",
        "per second": "每秒",
        "per hour": "每小时 每时",
        "per minute": "每分钟",
        "per day": "每天",
        "per person": "每人",
        "/ h": "/时",
        "/ min": "/分",
        "yuan": "元 块 块钱 人民币 圆 元钱 元人民币",
        "dollars": "美元 美金",
        "euros": "欧元",
        "yen": "日元",
        "pounds sterling": "英镑",
        "mm": "毫米",
        "cm": "厘米 公分",
        "dm": "分米",
        "m": "米 公尺",
        "km": "千米 公里",
        "mm^2": "平方毫米",
        "cm^2": "平方厘米",
        "dm^2": "平方分米",
        "m^2": "平方米 平米",
        "km^2": "平方千米 平方公里",
        "cm^3": "立方厘米",
        "dm^3": "立方分米",
        "m^3": "立方米",
        "mg": "毫克",
        "g": "克",
        "kg": "千克 公斤",
        "tons": "吨",
        "ml": "毫升",
        "liters": "升 公升",
        "seconds": "秒 秒钟",
        "minutes": "分钟",
        "hours": "小时 个小时 钟头 个钟头",
        "days": "天 日",
        "weeks": "周 星期 个星期",
        "months": "月 个月",
        "years": "年",
        "years old": "岁",
        "degrees": "度",
        "degrees celsius": "摄氏度",
        "degrees fahrenheit": "华氏度",
        "times": "倍 次",
        "units": "个 位 名 只 头 条 本 张 支 枝 辆 棵 颗 件 把 台 座 间 套 片 朵 匹 种 项 道 根 株 架 艘 门 户 家 "
        "份 层 幅 粒 节 段 单位 平方单位",
        "people": "人 个人",
        "ways": "方法 种方法 办法 方式 种方式 情况 种情况",
        "distinct": "不同",
        "triangles": "三角形",
        "squares": "正方形",
        "rectangles": "长方形",
        "quadrilaterals": "四边形",
        "dozen": "打",
        "Monday": "星期一 周一",
        "Tuesday": "星期二 周二",
        "Wednesday": "星期三 周三",
        "Thursday": "星期四 周四",
        "Friday": "星期五 周五",
        "Saturday": "星期六 周六",
        "Sunday": "星期日 星期天 周日",
    }.items()
    for chinese in words.split()
}
_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_TRADITIONAL = str.maketrans(
    "萬億兩負個約無為點塊圓條張輛種間隻選項總時錢與還數過對錯幾減虧損債佰仟拾",
    "万亿两负个约无为点块元条张辆种间只选项总时钱与还数过对错几减亏损债百千十",
)
_SCALES = {"亿": 10**8, "万": 10**4, "千": 10**3, "百": 10**2, "十": 10}
_HAN = "[\u3007\u4e00-\u9fff]"
_ANY_HAN = re.compile(_HAN)
_NUMERAL = (
    r"(?:[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?(?: ?(?!千[米克瓦])[十百千万亿][0-9]{0,4}){1,6}"
    "|[一二两三四五六七八九]千(?=[米克瓦])"
    "|(?:(?!千[米克瓦])[〇零一二两三四五六七八九十百千万亿]){1,20}(?:点[〇零一二三四五六七八九]{1,20})?)"
)
_COUNT = rf"(?:{_NUMERAL}|[0-9]{{1,20}}(?:\.[0-9]{{1,20}})?)"
_FRACTION = re.compile(f"(?:({_COUNT})又)?({_COUNT})分之({_COUNT})")
_ROOT = re.compile(f"根号下?({_COUNT})")
_PIECES = re.compile(
    rf"负(?P<negative>(?={_COUNT}|\\))|(?P<word>{'|'.join(sorted(_WORDS, key=len, reverse=True))})"
    rf"|(?P<numeral>{_NUMERAL})|(?P<other>{_HAN})|[^\u3007\u4e00-\u9fff0-9]+|[0-9]+"
)
_CONSONANTS = "bcdfghjkmpqrtvwx"


def translate_chinese(text: str) -> str:
    """`text` with English words and digits in place of Chinese characters."""
    if not _ANY_HAN.search(text):
        return text
    text = text.translate(_TRADITIONAL)
    result: list[str] = []
    was_other = False
    text = _ROOT.sub(lambda root: rf"\sqrt{{{_digits(root[1]) or root[1]}}}", _FRACTION.sub(_fraction, text))
    for match in _PIECES.finditer(text):
        is_other = match.lastgroup == "other"
        if is_other != was_other:
            result.append(" han" if is_other else " ")
        was_other = is_other
        if is_other:
            result.append("".join(_CONSONANTS[int(digit, 16)] for digit in f"{ord(match.group()):x}"))
        elif match.lastgroup == "negative":
            result.append("-")
        elif match.lastgroup == "word":
            result.append(f" {_WORDS[match.group()]} ")
        else:
            result.append(_digits(match.group()) or match.group())
    return "".join(result)


def _fraction(match: re.Match[str]) -> str:
    """`百分之25` as 25% and `四分之三` as three quarters."""
    whole, bottom, top = (part and _digits(part) for part in match.groups())
    if not bottom or not top:
        return match.group()
    return f"{top}%" if bottom == "100" and not whole else rf"{whole or ''}\frac{{{top}}}{{{bottom}}}"


def _digits(numeral: str) -> str:
    """A numeral in digits, "" where it is malformed; anything without Chinese digits as it is."""
    if not _ANY_HAN.search(numeral):
        return numeral
    whole, _, decimals = numeral.partition("点")
    value = _value(whole)
    if value is None:
        return ""
    if value.denominator != 1:
        return str(float(value))
    return str(value) + "".join("." * (not place) + str(_DIGITS[sign]) for place, sign in enumerate(decimals))


def _value(numeral: str) -> Fraction | None:
    """`二百五十` and `3万5千` by their largest scale: what stands before counts it, what stands after is less."""
    for sign, scale in _SCALES.items():
        before, found, after = numeral.rpartition(sign)
        if found:
            count = _value(before) if before else Fraction(1)
            rest = _value(after.lstrip("零〇")) if after.lstrip("零〇") else Fraction(0)
            return count * scale + rest if count and rest is not None and rest < scale else None
    if all(sign in _DIGITS for sign in numeral) and len(numeral) != 2:  # digits one by one are those of a year
        return Fraction(int("".join(str(_DIGITS[sign]) for sign in numeral)))
    plain = numeral.replace(",", "").replace(" ", "")
    return Fraction(plain) if plain.replace(".", "", 1).isdecimal() else None
